// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.ArrayDeque;
import java.util.Deque;

/** Events of Spark that the Python driver has not fetched yet. Bounded, because the driver may never fetch. */
final class DriverEventQueue {
  static final int MAX_EVENTS = 20_000;

  private final Deque<String> events = new ArrayDeque<>();
  private long first = 1;

  /** Adds an object in JSON. */
  synchronized void add(String object) {
    events.addLast(object);
    if (events.size() > MAX_EVENTS) {
      events.removeFirst();
      first++;
    }
  }

  /** Returns the events from a number on, as JSON: the number to ask for next, and the objects. */
  synchronized String since(long number) {
    long next = first + events.size();
    StringBuilder out = new StringBuilder("{\"next\":").append(next).append(",\"news\":[");
    long at = first;
    boolean any = false;
    for (String one : events) {
      if (at++ >= number) {
        out.append(any ? "," : "").append(one);
        any = true;
      }
    }
    return out.append("]}").toString();
  }
}
