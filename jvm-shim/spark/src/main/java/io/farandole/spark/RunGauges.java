// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import com.codahale.metrics.Gauge;
import com.codahale.metrics.MetricRegistry;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

/** Metrics of the run that reported last, in Spark's metrics system. */
final class RunGauges {
  /**
   * Rows of all ranks in a second; seconds of a step, of its reductions and of its waits for data;
   * restarts.
   */
  static final String[] NAMES = {"rowsPerSecond", "stepSeconds", "reduceSeconds", "waitSeconds", "restarts"};

  private final Map<String, Double> values = new ConcurrentHashMap<>();

  void register(MetricRegistry registry) {
    for (String name : NAMES) {
      values.put(name, 0.0);
      registry.register(name, (Gauge<Double>) () -> values.get(name));
    }
  }

  void set(String name, double value) {
    if (values.containsKey(name)) {
      values.put(name, value);
    }
  }
}
