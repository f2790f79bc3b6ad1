// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Function;
import java.util.function.UnaryOperator;
import org.apache.spark.ui.SparkUI;
import org.apache.spark.ui.WebUITab;
import scala.collection.Iterator;
import scala.collection.Seq;

/**
 * Answers of the Training tab: three files that never change, and rows as JSON. No value is put
 * into HTML here: the script writes values as text, and the policy lets the browser run only that
 * script.
 */
final class TrainingPage {
  static final int MAX_ROWS_PER_ANSWER = 5000;

  /** Headers of every answer. */
  static final Map<String, String> HEADERS = headers();

  private static final String NOT_FOUND = "not found";
  private static final String JSON = "application/json; charset=utf-8";
  private static final String TEXT = "text/plain; charset=utf-8";

  private final SparkUI ui;
  private final Function<String, Path> timelines;

  /** {@code timelines} gives the file of a run's timeline, or null. */
  TrainingPage(SparkUI ui, Function<String, Path> timelines) {
    this.ui = ui;
    this.timelines = timelines;
  }

  /** A status, a type and bytes, or a file to save under a name. */
  static final class Answer {
    final int status;
    final String type;
    final String name;
    private final byte[] body;
    private final Path file;

    private Answer(int status, String type, byte[] body, String name, Path file) {
      this.status = status;
      this.type = type;
      this.body = body;
      this.name = name;
      this.file = file;
    }

    static Answer bytes(String type, byte[] body) {
      return new Answer(200, type, body, null, null);
    }

    static Answer text(int status, String type, String text) {
      return new Answer(status, type, text.getBytes(StandardCharsets.UTF_8), null, null);
    }

    static Answer download(String type, String name, Path file) {
      return new Answer(200, type, null, name, file);
    }

    void write(OutputStream out) throws IOException {
      if (file == null) {
        out.write(body);
      } else {
        Files.copy(file, out);
      }
    }
  }

  /** The answer to a path below the tab's; never throws. */
  Answer answer(String path, UnaryOperator<String> parameter) {
    try {
      switch (path == null ? "/" : path) {
        case "/":
          return file("training.html", "text/html; charset=utf-8");
        case "/training.js":
          return file("training.js", "text/javascript; charset=utf-8");
        case "/training.css":
          return file("training.css", "text/css; charset=utf-8");
        case "/rows":
          return Answer.text(200, JSON, rows(number(parameter.apply("since"))));
        case "/timeline":
          return timeline(parameter.apply("run"));
        default:
          return Answer.text(404, TEXT, NOT_FOUND);
      }
    } catch (Throwable error) {
      FailureGuard.warn("the Training tab cannot answer " + JsonText.quote(String.valueOf(path)) + ": " + error);
      return Answer.text(500, TEXT, "the Training tab cannot answer; the log says why");
    }
  }

  private Answer timeline(String run) {
    Path file = run == null ? null : timelines.apply(run);
    if (file == null || !Files.isReadable(file)) {
      return Answer.text(404, TEXT, "the driver has no timeline of this run");
    }
    return Answer.download(JSON, "timeline.json", file);
  }

  private String rows(long since) throws Exception {
    List<TrainingRow> rows = TrainingRows.since(ui.store().store(), since, MAX_ROWS_PER_ANSWER);
    StringBuilder out = new StringBuilder("{\"live\":").append(ui.sc().isDefined());
    out.append(",\"more\":").append(rows.size() == MAX_ROWS_PER_ANSWER);
    out.append(",\"seq\":").append(rows.isEmpty() ? since : rows.get(rows.size() - 1).seq);
    out.append(",\"application\":").append(JsonText.quote(ui.getAppName()));
    out.append(",\"tabs\":[").append(since == 0 ? tabs() : "").append("],\"rows\":[");
    for (int at = 0; at < rows.size(); at++) {
      TrainingRow row = rows.get(at);
      out.append(at > 0 ? ",[" : "[").append(JsonText.quote(row.run)).append(',').append(JsonText.quote(row.key));
      // As a string, which the page reads by itself: one that is no JSON is only lost, and spoils
      // no other.
      out.append(',').append(JsonText.quote(ExecutorLogLinks.isOf(row) ? ExecutorLogLinks.shown(ui, row) : row.body)).append(']');
    }
    return out.append("]}").toString();
  }

  /**
   * Names and paths of Spark's tabs. Reflection: the type of a list differs between Scala 2.12 and
   * 2.13.
   */
  private String tabs() throws ReflectiveOperationException {
    Seq<?> tabs = (Seq<?>) ui.getClass().getMethod("getTabs").invoke(ui);
    StringBuilder out = new StringBuilder();
    for (Iterator<?> each = tabs.iterator(); each.hasNext(); ) {
      WebUITab tab = (WebUITab) each.next();
      out.append(out.length() > 0 ? ",[" : "[");
      out.append(JsonText.quote(tab.name())).append(',').append(JsonText.quote(tab.prefix())).append(']');
    }
    return out.toString();
  }

  private static long number(String text) {
    try {
      return text == null ? 0 : Math.max(0, Long.parseLong(text));
    } catch (NumberFormatException error) {
      return 0;
    }
  }

  private static Answer file(String name, String type) throws IOException {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    try (InputStream in = TrainingPage.class.getResourceAsStream(name)) {
      if (in == null) {
        return Answer.text(404, TEXT, NOT_FOUND);
      }
      byte[] some = new byte[8192];
      for (int count = in.read(some); count >= 0; count = in.read(some)) {
        bytes.write(some, 0, count);
      }
    }
    return Answer.bytes(type, bytes.toByteArray());
  }

  private static Map<String, String> headers() {
    Map<String, String> headers = new HashMap<>();
    headers.put(
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
            + "base-uri 'none'; form-action 'none'");
    headers.put("X-Content-Type-Options", "nosniff");
    headers.put("Referrer-Policy", "no-referrer");
    headers.put("Cache-Control", "no-cache, no-store");
    return Collections.unmodifiableMap(headers);
  }
}
