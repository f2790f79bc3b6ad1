// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.ui.SparkUI;
import scala.Tuple2;
import scala.collection.Iterator;

/**
 * Links to the logs of executors: rows whose body has a URL for each name, such as {@code stderr}.
 */
final class ExecutorLogLinks {
  /** Begins the names of these rows; the executor's number follows. */
  static final String KEY = "logs/";

  private ExecutorLogLinks() {}

  static boolean isOf(TrainingRow row) {
    return row.run.isEmpty() && row.key.startsWith(KEY);
  }

  static String object(scala.collection.Map<String, String> urls) {
    List<String> parts = new ArrayList<>();
    for (Iterator<Tuple2<String, String>> each = urls.iterator(); each.hasNext(); ) {
      Tuple2<String, String> one = each.next();
      parts.add(one._1());
      parts.add(one._2());
    }
    return JsonText.object(parts.toArray(new String[0]));
  }

  /**
   * What the page gets. A History Server may have a pattern of its own for these links, since an
   * executor's own page ends with it. It applies the pattern to what its store answers. The store
   * forgets old executors, and the row does not.
   */
  static String shown(SparkUI ui, TrainingRow row) {
    if (ui.sc().isDefined()) {
      return row.body;
    }
    try {
      return object(ui.store().executorSummary(row.key.substring(KEY.length())).executorLogs());
    } catch (Throwable forgotten) {
      return row.body;
    }
  }
}
