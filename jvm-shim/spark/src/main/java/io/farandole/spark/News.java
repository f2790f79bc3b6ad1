// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.ArrayDeque;
import java.util.Deque;

/** What the Python driver has not heard yet of what Spark knows. Bounded: nobody may ask. */
final class News {
  static final int MOST = 20_000;

  private final Deque<String> told = new ArrayDeque<>();
  private long first = 1;

  /** Adds an object in JSON. */
  synchronized void add(String object) {
    told.addLast(object);
    if (told.size() > MOST) {
      told.removeFirst();
      first++;
    }
  }

  /** Everything from a number on, as JSON: the number to ask for next, and the objects. */
  synchronized String since(long number) {
    long next = first + told.size();
    StringBuilder out = new StringBuilder("{\"next\":").append(next).append(",\"news\":[");
    long at = first;
    boolean any = false;
    for (String one : told) {
      if (at++ >= number) {
        out.append(any ? "," : "").append(one);
        any = true;
      }
    }
    return out.append("]}").toString();
  }
}
