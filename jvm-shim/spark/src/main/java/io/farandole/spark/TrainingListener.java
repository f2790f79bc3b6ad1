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
  private final Rows rows;
  private final Gangs gangs = new Gangs();

  TrainingListener(Rows rows) {
    this.rows = rows;
  }

  @Override
  public void onOtherEvent(SparkListenerEvent event) {
    if (event instanceof TrainingEvent) {
      TrainingEvent told = (TrainingEvent) event;
      keep(() -> rows.put(told.run, told.key, told.body));
    }
  }

  @Override
  public void onExecutorAdded(SparkListenerExecutorAdded event) {
    keep(
        () -> {
          String host = event.executorInfo().executorHost();
          String body = Json.object("state", "added", "host", host, "time", "" + event.time());
          rows.put("", "executor/" + event.executorId(), body);
          String logs = Logs.object(event.executorInfo().logUrlMap());
          rows.put("", Logs.KEY + event.executorId(), logs);
        });
  }

  @Override
  public void onExecutorRemoved(SparkListenerExecutorRemoved event) {
    keep(
        () -> {
          String body = Json.object("state", "removed", "reason", event.reason(), "time", "" + event.time());
          rows.put("", "removed/" + event.executorId(), body);
        });
  }

  @Override
  public void onStageSubmitted(SparkListenerStageSubmitted event) {
    Guard.attempt(
        "a stage's tags were not read",
        () -> {
          String tag = gangs.submitted(event);
          if (tag != null) {
            String attempt = "" + event.stageInfo().attemptNumber();
            String stage = "" + event.stageInfo().stageId();
            String body = Json.object("tag", tag, "stage", stage, "attempt", attempt);
            rows.put("", "stage/" + stage + "." + attempt, body);
          }
        });
  }

  @Override
  public void onStageCompleted(SparkListenerStageCompleted event) {
    Guard.attempt("a stage's end was not seen", () -> gangs.completed(event));
  }

  private static void keep(Guard.Attempt attempt) {
    Guard.attempt("an event was not kept for the Training tab", attempt);
  }
}
