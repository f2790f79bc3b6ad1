// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/** Runs what must never fail a user's job: an error becomes one line in the log. */
final class Guard {
  private static final Set<String> TOLD = ConcurrentHashMap.newKeySet();

  private Guard() {}

  /** Something that may go wrong. */
  interface Attempt {
    void run() throws Throwable;
  }

  /** Something that may go wrong, and that returns a value. */
  interface Making<T> {
    T make() throws Throwable;
  }

  /** Runs an attempt; whatever it throws, the caller goes on. */
  static void attempt(String what, Attempt attempt) {
    made(
        what,
        null,
        () -> {
          attempt.run();
          return null;
        });
  }

  /** Makes a value; whatever that throws, the caller gets {@code otherwise} and goes on. */
  static <T> T made(String what, T otherwise, Making<? extends T> making) {
    try {
      return making.make();
    } catch (Throwable error) {
      // One line each: what fails for every event of Spark's would fill the log.
      if (TOLD.add(what + error.getClass().getName())) {
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
