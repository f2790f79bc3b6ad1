// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Consumer;
import org.apache.spark.SparkContext;

/**
 * Asks Spark's scheduler which executors are being decommissioned: no event of a listener says so.
 */
final class Decommissions {
  private static final long EVERY_MILLIS = 250;

  private final SparkContext context;
  private final Consumer<String> told;
  private final Set<String> executors = ConcurrentHashMap.newKeySet();
  private volatile boolean over;
  private Thread thread;

  Decommissions(SparkContext context, Consumer<String> told) {
    this.context = context;
    this.told = told;
  }

  synchronized void start() {
    thread = new Thread(() -> Guard.attempt("decommissioned executors are no longer watched", this::look));
    thread.setName("farandole-decommissions");
    thread.setDaemon(true);
    thread.start();
  }

  synchronized void end() {
    over = true;
    if (thread != null) {
      thread.interrupt();
    }
  }

  void watch(String executor) {
    executors.add(executor);
  }

  void forget(String executor) {
    executors.remove(executor);
  }

  private void look() {
    while (!over) {
      for (String executor : executors) {
        if (context.taskScheduler().getExecutorDecommissionState(executor).isDefined()) {
          executors.remove(executor);
          told.accept(executor);
        }
      }
      try {
        Thread.sleep(EVERY_MILLIS);
      } catch (InterruptedException ended) {
        return;
      }
    }
  }
}
