// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

/** The door for the Python driver, which calls it by py4j. It never throws. */
public final class Trainings {
  static volatile DriverHalf driver;

  private Trainings() {}

  /** Whether a SparkContext runs with the plugin. */
  public static boolean isOn() {
    return driver != null;
  }

  /** Writes a row of a run; {@code body} is JSON. */
  public static void put(String run, String key, String body, boolean logged) {
    DriverHalf to = driver;
    if (to != null) {
      Guard.attempt("a row of a training was not kept", () -> to.post(run, key, body, logged));
    }
  }

  /** Sets a number of {@link Gauges}. */
  public static void gauge(String name, double value) {
    DriverHalf to = driver;
    if (to != null) {
      Guard.attempt("a metric was not set", () -> to.gauges().set(name, value));
    }
  }

  /**
   * Names the file with a run's timeline, which the live tab then offers; no other file of the
   * driver can be read there.
   */
  public static void timeline(String run, String path) {
    DriverHalf to = driver;
    if (to != null) {
      Guard.attempt("a timeline was not noted", () -> to.timeline(run, path));
    }
  }

  /** What Spark said since a number, as {@link News#since}; without a plugin nothing. */
  public static String news(long since) {
    DriverHalf to = driver;
    return to == null ? "{\"next\":" + since + ",\"news\":[]}" : to.news().since(since);
  }
}
