// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

/** Writes JSON. A library would bring another version of itself into the user's class path. */
final class JsonText {
  private JsonText() {}

  /**
   * A string with its quotes. Everything that HTML or a script could take for its own is escaped,
   * too.
   */
  static String quote(String text) {
    StringBuilder out = new StringBuilder(text.length() + 16).append('"');
    for (int at = 0; at < text.length(); at++) {
      char one = text.charAt(at);
      if (one == '"' || one == '\\') {
        out.append('\\').append(one);
      } else if (one < 0x20 || one == '<' || one == '>' || one == '&' || one == '\'' || one > 0x7e) {
        out.append(String.format("\\u%04x", (int) one));
      } else {
        out.append(one);
      }
    }
    return out.append('"').toString();
  }

  /** An object of names and strings, in the order given; a value of null leaves its name out. */
  static String object(String... namesAndValues) {
    StringBuilder out = new StringBuilder("{");
    for (int at = 0; at < namesAndValues.length; at += 2) {
      if (namesAndValues[at + 1] != null) {
        out.append(out.length() > 1 ? "," : "");
        out.append(quote(namesAndValues[at])).append(':').append(quote(namesAndValues[at + 1]));
      }
    }
    return out.append('}').toString();
  }
}
