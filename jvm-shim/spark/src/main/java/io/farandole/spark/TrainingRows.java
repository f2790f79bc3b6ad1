// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import org.apache.spark.util.kvstore.KVStore;
import org.apache.spark.util.kvstore.KVStoreIterator;

/** The rows of one application. Of more than {@link #MAX_RUNS} runs the oldest are forgotten. */
final class TrainingRows {
  static final int MAX_RUNS = 200;
  static final int MAX_BODY_CHARS = 1 << 20;

  private final KVStore store;
  private final Set<String> runs = new LinkedHashSet<>();
  private long seq;

  TrainingRows(KVStore store) {
    this.store = store;
  }

  /** Writes a row. It replaces an earlier row of its name. */
  synchronized void put(String run, String key, String body) throws Exception {
    if (run == null || key == null || body == null || body.length() > MAX_BODY_CHARS) {
      return;
    }
    store.write(new TrainingRow(++seq, run, key, body));
    if (runs.add(run) && runs.size() > MAX_RUNS) {
      String oldest = runs.stream().filter(one -> !one.isEmpty()).findFirst().orElse(run);
      runs.remove(oldest);
      forget(oldest);
    }
  }

  private void forget(String run) throws Exception {
    List<String> ids = new ArrayList<>();
    try (KVStoreIterator<TrainingRow> rows = store.view(TrainingRow.class).index("run").first(run).last(run).closeableIterator()) {
      while (rows.hasNext()) {
        ids.add(rows.next().id);
      }
    }
    for (String id : ids) {
      store.delete(TrainingRow.class, id);
    }
  }

  /** Returns rows that were written after a change, the oldest change first. */
  static List<TrainingRow> since(KVStore store, long seq, int most) throws Exception {
    List<TrainingRow> found = new ArrayList<>();
    try (KVStoreIterator<TrainingRow> rows = store.view(TrainingRow.class).index("seq").first(seq + 1).max(most).closeableIterator()) {
      while (rows.hasNext()) {
        found.add(rows.next());
      }
    }
    return found;
  }

  static boolean isEmpty(KVStore store) throws Exception {
    return store.count(TrainingRow.class) == 0;
  }
}
