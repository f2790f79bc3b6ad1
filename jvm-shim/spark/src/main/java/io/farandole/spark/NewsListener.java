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

/** Tells the Python driver what becomes of executors, and of the stages and tasks of gangs. */
public final class NewsListener extends SparkListener {
  private static final int LONGEST = 2000;

  private final News news;
  private final Decommissions decommissions;
  private final Gangs gangs = new Gangs();

  NewsListener(News news, Decommissions decommissions) {
    this.news = news;
    this.decommissions = decommissions;
  }

  @Override
  public void onExecutorAdded(SparkListenerExecutorAdded event) {
    Guard.attempt(
        "an executor's start was not told",
        () -> {
          decommissions.watch(event.executorId());
          String host = event.executorInfo().executorHost();
          news.add(Json.object("kind", "added", "executor", event.executorId(), "host", host));
        });
  }

  @Override
  public void onExecutorRemoved(SparkListenerExecutorRemoved event) {
    Guard.attempt(
        "an executor's end was not told",
        () -> {
          decommissions.forget(event.executorId());
          news.add(Json.object("kind", "removed", "executor", event.executorId(), "reason", shortened(event.reason())));
        });
  }

  @Override
  public void onStageSubmitted(SparkListenerStageSubmitted event) {
    Guard.attempt("a stage's tags were not read", () -> gangs.submitted(event));
  }

  @Override
  public void onStageCompleted(SparkListenerStageCompleted event) {
    Guard.attempt(
        "a stage's end was not told",
        () -> {
          String tag = gangs.tag(event.stageInfo().stageId());
          gangs.completed(event);
          if (tag != null && event.stageInfo().failureReason().isDefined()) {
            String reason = shortened(event.stageInfo().failureReason().get());
            news.add(Json.object("kind", "stage", "tag", tag, "reason", reason));
          }
        });
  }

  @Override
  public void onTaskStart(SparkListenerTaskStart event) {
    Guard.attempt(
        "a task's start was not told",
        () -> {
          String tag = gangs.tag(event.stageId());
          if (tag != null) {
            String executor = event.taskInfo().executorId();
            String task = "" + event.taskInfo().partitionId();
            String stage = "" + event.stageId();
            news.add(
                Json.object("kind", "started", "tag", tag, "stage", stage, "task", task, "executor", executor));
          }
        });
  }

  @Override
  public void onTaskEnd(SparkListenerTaskEnd event) {
    Guard.attempt(
        "a task's end was not told",
        () -> {
          String tag = gangs.tag(event.stageId());
          if (tag != null && event.reason() instanceof TaskFailedReason) {
            String reason = shortened(((TaskFailedReason) event.reason()).toErrorString());
            String executor = event.taskInfo().executorId();
            String task = "" + event.taskInfo().partitionId();
            news.add(
                Json.object("kind", "failed", "tag", tag, "task", task, "executor", executor, "reason", reason));
          }
        });
  }

  private static String shortened(String text) {
    return text == null || text.length() <= LONGEST ? text : text.substring(0, LONGEST);
  }
}
