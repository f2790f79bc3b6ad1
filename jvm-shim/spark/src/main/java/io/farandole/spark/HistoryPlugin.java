// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.SparkConf;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.status.AppHistoryServerPlugin;
import org.apache.spark.status.ElementTrackingStore;
import org.apache.spark.ui.SparkUI;
import org.apache.spark.util.kvstore.KVStore;
import scala.collection.immutable.List;
import scala.collection.immutable.Nil$;
import scala.collection.immutable.Seq;

/**
 * The tab in the History Server: rows are made from the event log, and there is no SparkContext.
 */
public final class HistoryPlugin implements AppHistoryServerPlugin {
  /** For Java's service loader. */
  public HistoryPlugin() {}

  /**
   * This type is a {@code Seq} of Scala 2.12 and of 2.13; the compiler adds the method that 2.12
   * looks for.
   */
  @Override
  @SuppressWarnings("unchecked")
  public Seq<SparkListener> createListeners(SparkConf conf, ElementTrackingStore store) {
    List<SparkListener> none = (List<SparkListener>) (List<?>) Nil$.MODULE$;
    return FailureGuard.valueOrElse(
        "an application has no Training tab", none, () -> none.$colon$colon(new TrainingListener(new TrainingRows(store))));
  }

  @Override
  public void setupUI(SparkUI ui) {
    FailureGuard.attempt(
        "there is no Training tab",
        () -> {
          KVStore store = ui.store().store();
          if (!TrainingRows.isEmpty(store)) {
            TrainingTab.attach(ui, run -> null);
          }
        });
  }

  @Override
  public int displayOrder() {
    return 100;
  }
}
