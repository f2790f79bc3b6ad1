// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.spark.util.kvstore.InMemoryStore;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** What needs no Spark that runs. */
class PartsTest {
  @Test
  void textAsJsonHasNothingThatHtmlOrAScriptCouldTakeForItsOwn() {
    String hostile = "</script>&'\"\\\n\u2028\u00e9";
    String quoted = JsonText.quote(hostile);
    assertEquals("\"\\u003c/script\\u003e\\u0026\\u0027\\\"\\\\\\u000a\\u2028\\u00e9\"", quoted);
    assertEquals("{\"a\":\"1\",\"c\":\"3\"}", JsonText.object("a", "1", "b", null, "c", "3"));
  }

  @Test
  void newsAreToldOnceAndTheOldestAreForgotten() {
    DriverEventQueue news = new DriverEventQueue();
    assertEquals("{\"next\":1,\"news\":[]}", news.since(0));
    news.add("{}");
    news.add("[]");
    assertEquals("{\"next\":3,\"news\":[{},[]]}", news.since(0));
    assertEquals("{\"next\":3,\"news\":[[]]}", news.since(2));
    for (int count = 0; count < DriverEventQueue.MAX_EVENTS; count++) {
      news.add("1");
    }
    assertEquals("{\"next\":20003,\"news\":[1]}", news.since(DriverEventQueue.MAX_EVENTS + 2));
    assertTrue(news.since(0).length() < 2 * DriverEventQueue.MAX_EVENTS + 100);
  }

  @Test
  void rowsAreReplacedAndThoseOfTheOldestRunsForgotten() throws Exception {
    InMemoryStore store = new InMemoryStore();
    TrainingRows rows = new TrainingRows(store);
    rows.put("", "host/1", "{}");
    rows.put("run-0", "run", "1");
    rows.put("run-0", "run", "2");
    List<TrainingRow> found = TrainingRows.since(store, 0, 10);
    assertEquals(2, found.size());
    assertEquals("2", found.get(1).body);
    assertEquals(1, TrainingRows.since(store, found.get(0).seq, 10).size());
    rows.put("run-0", "large", new String(new char[TrainingRows.MAX_BODY_CHARS + 1]));
    assertEquals(2, store.count(TrainingRow.class));
    for (int run = 1; run < TrainingRows.MAX_RUNS; run++) {
      rows.put("run-" + run, "run", "{}");
    }
    found = TrainingRows.since(store, 0, 1000);
    assertEquals("host/1", found.get(0).key, "what is of the application stays");
    assertEquals("run-1", found.get(1).run);
    assertEquals(TrainingRows.MAX_RUNS, found.size());
  }

  @Test
  void onlyWorkersBelowAProcessAreLeftOver(@TempDir Path proc) throws Exception {
    process(proc, "10", "1", "java");
    process(proc, "11", "10", "python\0-m\0pyspark.daemon");
    process(proc, "12", "11", "python\0-m\0farandole.runner.worker");
    process(proc, "13", "1", "python\0-m\0farandole.runner.worker");
    process(proc, "14", "12", "python\0train.py");
    assertEquals(List.of("12"), LeftoverWorkers.workers("10", proc));
  }

  /**
   * Real processes. A shell has the mark of a worker as a word of its command, after the script.
   */
  @Test
  void anExecutorThatEndsKillsTheWorkersBelowItAndNoOtherProcess() throws Exception {
    String waits = "while :; do sleep 0.1; done";
    String starts = "sh -c '" + waits + "' farandole.runner.stand-in >&2 & echo $!";
    Process worker = shell(waits, "farandole.runner.stand-in", "");
    Process other = shell(waits, "another.program", "");
    // The shell between has no mark, as the daemon of Spark's Python workers.
    Process daemon = shell("eval \"$INNER\"", "pyspark.daemon", starts + "; wait");
    Process ended = shell("eval \"$INNER\"", "sh", starts);
    ProcessHandle below = told(daemon);
    ProcessHandle elsewhere = told(ended);
    try {
      ended.waitFor();
      assertTrue(ProcessHandle.current().descendants().noneMatch(elsewhere::equals), "it has another parent");
      new ExecutorSide().shutdown();
      assertTrue(worker.waitFor(10, TimeUnit.SECONDS));
      assertEquals(128 + 9, worker.exitValue());
      below.onExit().get(10, TimeUnit.SECONDS);
      assertTrue(daemon.waitFor(10, TimeUnit.SECONDS), "it has no worker to wait for");
      assertEquals(0, daemon.exitValue());
      assertTrue(other.isAlive());
      assertTrue(elsewhere.isAlive(), "a worker of another executor of this host");
    } finally {
      for (Process one : List.of(worker, other, daemon)) {
        one.destroyForcibly();
      }
      below.destroyForcibly();
      elsewhere.destroyForcibly();
    }
  }

  @Test
  void modelsOfGpusAreRead(@TempDir Path driver) throws Exception {
    assertEquals(List.of(), ExecutorSide.gpus(driver.resolve("absent")));
    Path gpu = Files.createDirectories(driver.resolve("0000:3b:00.0"));
    Files.writeString(gpu.resolve("information"), "Model: \t\t NVIDIA H200\nIRQ:   \t\t 86\n");
    assertEquals(List.of("NVIDIA H200"), ExecutorSide.gpus(driver));
  }

  @Test
  void executorsStartNoForkServerUnlessTheSettingSaysSo() {
    Map<String, String> driver = Map.of("PYSPARK_PYTHON", "/env/bin/python", "PYTHONHASHSEED", "7");
    assertEquals(Map.of(), WarmServerStarter.settings(name -> null, driver));
    Map<String, String> conf = new HashMap<>(Map.of(WarmServerStarter.ON, "true"));
    assertEquals(Map.of("python", "/env/bin/python", "PYTHONHASHSEED", "7"), WarmServerStarter.settings(conf::get, driver));
    assertEquals(Map.of("python", "python3", "PYTHONHASHSEED", "0"), WarmServerStarter.settings(conf::get, Map.of()));
    conf.put("spark.pyspark.python", "/conf/bin/python");
    assertEquals("/conf/bin/python", WarmServerStarter.settings(conf::get, Map.of()).get("python"));
  }

  @Test
  void theForkServerHasTheEnvironmentOfSparksPythonWorkers() {
    Map<String, String> asked = Map.of("PYTHONPATH", "/job", "LANG", "C");
    Map<String, String> told = Map.of("python", "python3", "PYTHONHASHSEED", "0");
    Map<String, String> own = Map.of("PYTHONPATH", "/host", "HOME", "/root");
    assertEquals(
        Map.of("PYTHONPATH", "/spark:/job:/host", "LANG", "C", "PYTHONHASHSEED", "0", "PYTHONUNBUFFERED", "YES"),
        WarmServerStarter.environment(asked, told, own, "/spark"));
    assertEquals("", WarmServerStarter.environment(Map.of(), told, Map.of(), "").get("PYTHONPATH"));
  }

  @Test
  void logsOfAnExecutorBecomeAnObject() {
    scala.collection.immutable.Map<String, String> urls =
        new scala.collection.immutable.Map.Map1<>("stdout", "http://host:8081/?a=1&b=2");
    assertEquals("{\"stdout\":\"http://host:8081/?a=1\\u0026b=2\"}", ExecutorLogLinks.object(urls));
  }

  /** Events that cannot be read stand for an interface that a vendor has changed. */
  @Test
  void anEventThatCannotBeReadFailsNoListener() {
    TrainingListener listener = new TrainingListener(new TrainingRows(new InMemoryStore()));
    assertDoesNotThrow(() -> listener.onOtherEvent(null));
    assertDoesNotThrow(() -> listener.onExecutorAdded(null));
    assertDoesNotThrow(() -> listener.onExecutorRemoved(null));
    assertDoesNotThrow(() -> listener.onStageSubmitted(null));
    assertDoesNotThrow(() -> listener.onStageCompleted(null));
  }

  @Test
  void whatCannotBeMadeIsReplaced() {
    assertEquals("made", FailureGuard.valueOrElse("a test", "otherwise", () -> "made"));
    FailureGuard.ThrowingSupplier<String> fails =
        () -> {
          throw new NoClassDefFoundError("of a vendor");
        };
    assertEquals("otherwise", FailureGuard.valueOrElse("a test", "otherwise", fails));
  }

  private static Process shell(String script, String name, String inner) throws IOException {
    ProcessBuilder builder = new ProcessBuilder("sh", "-c", script, name);
    builder.environment().put("INNER", inner);
    return builder.start();
  }

  /** The process whose number another has written. */
  private static ProcessHandle told(Process by) throws IOException {
    String line = new BufferedReader(new InputStreamReader(by.getInputStream())).readLine();
    return ProcessHandle.of(Long.parseLong(line)).orElseThrow();
  }

  private static void process(Path proc, String number, String parent, String command) throws IOException {
    Path folder = Files.createDirectories(proc.resolve(number));
    Files.writeString(folder.resolve("stat"), number + " (a ) b) S " + parent + " 1 1");
    Files.writeString(folder.resolve("cmdline"), command);
  }
}
