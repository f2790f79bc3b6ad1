// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.SparkPlugin;

/** What {@code spark.plugins} names. */
public final class FarandolePlugin implements SparkPlugin {
  /** For Spark. */
  public FarandolePlugin() {}

  @Override
  public DriverPlugin driverPlugin() {
    return new DriverHalf();
  }

  @Override
  public ExecutorPlugin executorPlugin() {
    return new ExecutorHalf();
  }
}
