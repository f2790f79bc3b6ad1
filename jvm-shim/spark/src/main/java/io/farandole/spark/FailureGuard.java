// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/** Runs actions that must never fail a user's job: an error becomes one line in the log. */
final class FailureGuard {
  private static final Set<String> REPORTED_ERRORS = ConcurrentHashMap.newKeySet();

  private FailureGuard() {}

  /** An action that may throw. */
  interface ThrowingAction {
    void run() throws Throwable;
  }

  /** A supplier that may throw. */
  interface ThrowingSupplier<T> {
    T make() throws Throwable;
  }

  /** Runs an action; its error is logged and not thrown. */
  static void attempt(String what, ThrowingAction attempt) {
    valueOrElse(
        what,
        null,
        () -> {
          attempt.run();
          return null;
        });
  }

  /** Returns the supplier's value, or {@code otherwise} if it throws. */
  static <T> T valueOrElse(String what, T otherwise, ThrowingSupplier<? extends T> supplier) {
    try {
      return supplier.make();
    } catch (Throwable error) {
      // Once for each kind of error: an error at every event of Spark would fill the log.
      if (REPORTED_ERRORS.add(what + error.getClass().getName())) {
        warn(what + ": " + error);
      }
      return otherwise;
    }
  }

  /** Writes a line to stderr, where Spark's own log goes; its loggers differ between versions. */
  static void warn(String text) {
    System.err.println("WARN farandole: " + text);
  }
}
