// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.scheduler.SparkListenerEvent;

/**
 * One row of the Training tab, on Spark's listener bus and in its event log. Spark
 * writes and reads the public fields by itself; a History Server without this jar skips such
 * events.
 */
public final class TrainingEvent implements SparkListenerEvent {
  /** The run the row is of; empty for the application. */
  public String run;

  /**
   * The row's name within its run, such as {@code run} or {@code epoch/00000012}; a later one
   * replaces it.
   */
  public String key;

  /** JSON that only the page reads. */
  public String body;

  /** When, in milliseconds since 1970. */
  public long time;

  private final transient boolean logged;

  /** For Spark, which reads events from a log. */
  public TrainingEvent() {
    logged = true;
  }

  TrainingEvent(String run, String key, String body, boolean logged) {
    this.run = run;
    this.key = key;
    this.body = body;
    this.time = System.currentTimeMillis();
    this.logged = logged;
  }

  /** Whether the event log gets it: what changes several times a second is shown alone. */
  @Override
  public boolean logEvent() {
    return logged;
  }
}
