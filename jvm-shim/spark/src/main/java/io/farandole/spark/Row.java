// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.util.kvstore.KVIndex;

/**
 * A row in Spark's key-value store of an application, which may be on disk: public fields are what
 * it keeps.
 */
public final class Row {
  /** Run and key. */
  @KVIndex public String id;

  /**
   * Number of the change that wrote it: a page asks for what came after the last one that it has
   * seen.
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
  public Row() {}

  Row(long seq, String run, String key, String body) {
    this.id = run + "\n" + key;
    this.seq = seq;
    this.run = run;
    this.key = key;
    this.body = body;
  }
}
