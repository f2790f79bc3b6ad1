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
final class DecommissionWatcher {
  private static final long POLL_INTERVAL_MILLIS = 250;

  private final SparkContext context;
  private final Consumer<String> onDecommission;
  private final Set<String> executors = ConcurrentHashMap.newKeySet();
  private volatile boolean hasEnded;
  private Thread thread;

  DecommissionWatcher(SparkContext context, Consumer<String> onDecommission) {
    this.context = context;
    this.onDecommission = onDecommission;
  }

  synchronized void start() {
    thread = new Thread(() -> FailureGuard.attempt("decommissioned executors are no longer watched", this::pollScheduler));
    thread.setName("farandole-decommissions");
    thread.setDaemon(true);
    thread.start();
  }

  synchronized void end() {
    hasEnded = true;
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

  private void pollScheduler() {
    while (!hasEnded) {
      for (String executor : executors) {
        if (context.taskScheduler().getExecutorDecommissionState(executor).isDefined()) {
          executors.remove(executor);
          onDecommission.accept(executor);
        }
      }
      try {
        Thread.sleep(POLL_INTERVAL_MILLIS);
      } catch (InterruptedException ended) {
        return;
      }
    }
  }
}
