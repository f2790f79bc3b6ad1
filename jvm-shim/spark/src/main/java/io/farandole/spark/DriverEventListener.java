// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import org.apache.spark.TaskFailedReason;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerExecutorAdded;
import org.apache.spark.scheduler.SparkListenerExecutorRemoved;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;
import org.apache.spark.scheduler.SparkListenerTaskEnd;
import org.apache.spark.scheduler.SparkListenerTaskStart;

/** Queues events of executors, and of the stages and tasks of gangs, for the Python driver. */
public final class DriverEventListener extends SparkListener {
  private static final int MAX_REASON_CHARS = 2000;

  private final DriverEventQueue events;
  private final DecommissionWatcher decommissions;
  private final GangStages gangs = new GangStages();

  DriverEventListener(DriverEventQueue events, DecommissionWatcher decommissions) {
    this.events = events;
    this.decommissions = decommissions;
  }

  @Override
  public void onExecutorAdded(SparkListenerExecutorAdded event) {
    FailureGuard.attempt(
        "an executor's start was not queued",
        () -> {
          decommissions.watch(event.executorId());
          String host = event.executorInfo().executorHost();
          events.add(JsonText.object("kind", "added", "executor", event.executorId(), "host", host));
        });
  }

  @Override
  public void onExecutorRemoved(SparkListenerExecutorRemoved event) {
    FailureGuard.attempt(
        "an executor's end was not queued",
        () -> {
          decommissions.forget(event.executorId());
          events.add(JsonText.object("kind", "removed", "executor", event.executorId(), "reason", shortened(event.reason())));
        });
  }

  @Override
  public void onStageSubmitted(SparkListenerStageSubmitted event) {
    FailureGuard.attempt("a stage's tags were not read", () -> gangs.submitted(event));
  }

  @Override
  public void onStageCompleted(SparkListenerStageCompleted event) {
    FailureGuard.attempt(
        "a stage's end was not queued",
        () -> {
          String tag = gangs.tag(event.stageInfo().stageId());
          gangs.completed(event);
          if (tag != null && event.stageInfo().failureReason().isDefined()) {
            String reason = shortened(event.stageInfo().failureReason().get());
            events.add(JsonText.object("kind", "stage", "tag", tag, "reason", reason));
          }
        });
  }

  @Override
  public void onTaskStart(SparkListenerTaskStart event) {
    FailureGuard.attempt(
        "a task's start was not queued",
        () -> {
          String tag = gangs.tag(event.stageId());
          if (tag != null) {
            String executor = event.taskInfo().executorId();
            String task = "" + event.taskInfo().partitionId();
            String stage = "" + event.stageId();
            events.add(
                JsonText.object("kind", "started", "tag", tag, "stage", stage, "task", task, "executor", executor));
          }
        });
  }

  @Override
  public void onTaskEnd(SparkListenerTaskEnd event) {
    FailureGuard.attempt(
        "a task's end was not queued",
        () -> {
          String tag = gangs.tag(event.stageId());
          if (tag != null && event.reason() instanceof TaskFailedReason) {
            String reason = shortened(((TaskFailedReason) event.reason()).toErrorString());
            String executor = event.taskInfo().executorId();
            String task = "" + event.taskInfo().partitionId();
            events.add(
                JsonText.object("kind", "failed", "tag", tag, "task", task, "executor", executor, "reason", reason));
          }
        });
  }

  private static String shortened(String text) {
    return text == null || text.length() <= MAX_REASON_CHARS ? text : text.substring(0, MAX_REASON_CHARS);
  }
}
