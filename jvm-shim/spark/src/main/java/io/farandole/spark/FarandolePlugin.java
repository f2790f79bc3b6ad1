// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.SparkPlugin;

/**
 * What {@code spark.plugins} names. If a half cannot be made, Spark goes on without it: it takes
 * null for none.
 */
public final class FarandolePlugin implements SparkPlugin {
  /** For Spark. */
  public FarandolePlugin() {}

  @Override
  public DriverPlugin driverPlugin() {
    return Guard.made("the plugin has no driver's half", null, DriverHalf::new);
  }

  @Override
  public ExecutorPlugin executorPlugin() {
    return Guard.made("the plugin has no executor's half", null, ExecutorHalf::new);
  }
}
