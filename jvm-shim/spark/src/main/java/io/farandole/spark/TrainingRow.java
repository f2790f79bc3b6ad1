// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.util.kvstore.KVIndex;

/**
 * A row in Spark's key-value store of an application, which may be on disk. The store keeps public
 * fields.
 */
public final class TrainingRow {
  /** Run and key. */
  @KVIndex public String id;

  /**
   * Number of the change that wrote the row. A page asks for rows after the last number that it
   * has.
   */
  @KVIndex("seq")
  public long seq;

  /** As {@link TrainingEvent#run}. */
  @KVIndex("run")
  public String run;

  /** As {@link TrainingEvent#key}. */
  public String key;

  /** As {@link TrainingEvent#body}. */
  public String body;

  /** For the store. */
  public TrainingRow() {}

  TrainingRow(long seq, String run, String key, String body) {
    this.id = run + "\n" + key;
    this.seq = seq;
    this.run = run;
    this.key = key;
    this.body = body;
  }
}
