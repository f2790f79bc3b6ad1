// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.SparkPlugin;

/**
 * The class that {@code spark.plugins} names. If a side cannot be created, Spark continues without
 * it: null means none.
 */
public final class FarandolePlugin implements SparkPlugin {
  /** For Spark. */
  public FarandolePlugin() {}

  @Override
  public DriverPlugin driverPlugin() {
    return FailureGuard.valueOrElse("the plugin has no driver's half", null, DriverSide::new);
  }

  @Override
  public ExecutorPlugin executorPlugin() {
    return FailureGuard.valueOrElse("the plugin has no executor's half", null, ExecutorSide::new);
  }
}
