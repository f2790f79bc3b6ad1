// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerEvent;
import org.apache.spark.scheduler.SparkListenerExecutorAdded;
import org.apache.spark.scheduler.SparkListenerExecutorRemoved;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;

/** Makes rows of events: the same in a live application and from its log in the History Server. */
public final class TrainingListener extends SparkListener {
  private final TrainingRows rows;
  private final GangStages gangs = new GangStages();

  TrainingListener(TrainingRows rows) {
    this.rows = rows;
  }

  @Override
  public void onOtherEvent(SparkListenerEvent event) {
    if (event instanceof TrainingEvent) {
      TrainingEvent row = (TrainingEvent) event;
      keep(() -> rows.put(row.run, row.key, row.body));
    }
  }

  @Override
  public void onExecutorAdded(SparkListenerExecutorAdded event) {
    keep(
        () -> {
          String host = event.executorInfo().executorHost();
          String body = JsonText.object("state", "added", "host", host, "time", "" + event.time());
          rows.put("", "executor/" + event.executorId(), body);
          String logs = ExecutorLogLinks.object(event.executorInfo().logUrlMap());
          rows.put("", ExecutorLogLinks.KEY + event.executorId(), logs);
        });
  }

  @Override
  public void onExecutorRemoved(SparkListenerExecutorRemoved event) {
    keep(
        () -> {
          String body = JsonText.object("state", "removed", "reason", event.reason(), "time", "" + event.time());
          rows.put("", "removed/" + event.executorId(), body);
        });
  }

  @Override
  public void onStageSubmitted(SparkListenerStageSubmitted event) {
    FailureGuard.attempt(
        "a stage's tags were not read",
        () -> {
          String tag = gangs.submitted(event);
          if (tag != null) {
            String attempt = "" + event.stageInfo().attemptNumber();
            String stage = "" + event.stageInfo().stageId();
            String body = JsonText.object("tag", tag, "stage", stage, "attempt", attempt);
            rows.put("", "stage/" + stage + "." + attempt, body);
          }
        });
  }

  @Override
  public void onStageCompleted(SparkListenerStageCompleted event) {
    FailureGuard.attempt("a stage's end was not seen", () -> gangs.completed(event));
  }

  private static void keep(FailureGuard.ThrowingAction attempt) {
    FailureGuard.attempt("an event was not kept for the Training tab", attempt);
  }
}
