// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

/** The methods that the Python driver calls by py4j. They never throw. */
public final class DriverGateway {
  static volatile DriverSide driver;

  private DriverGateway() {}

  /** Whether a SparkContext runs with the plugin. */
  public static boolean isOn() {
    return driver != null;
  }

  /** Writes a row of a run; {@code body} is JSON. */
  public static void put(String run, String key, String body, boolean logged) {
    DriverSide to = driver;
    if (to != null) {
      FailureGuard.attempt("a row of a training was not kept", () -> to.post(run, key, body, logged));
    }
  }

  /** Sets a number of {@link RunGauges}. */
  public static void gauge(String name, double value) {
    DriverSide to = driver;
    if (to != null) {
      FailureGuard.attempt("a metric was not set", () -> to.gauges().set(name, value));
    }
  }

  /**
   * Names the file with a run's timeline, which the live tab then offers; no other file of the
   * driver can be read there.
   */
  public static void timeline(String run, String path) {
    DriverSide to = driver;
    if (to != null) {
      FailureGuard.attempt("a timeline was not noted", () -> to.timeline(run, path));
    }
  }

  /** Returns the events since a number, as {@link DriverEventQueue#since}; none without a plugin. */
  public static String news(long since) {
    DriverSide to = driver;
    return to == null ? "{\"next\":" + since + ",\"news\":[]}" : to.news().since(since);
  }
}
