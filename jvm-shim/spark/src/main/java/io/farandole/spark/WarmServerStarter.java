// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.UnaryOperator;
import java.util.stream.Collectors;
import org.apache.spark.SparkConf;
import org.apache.spark.SparkFiles;
import org.apache.spark.api.python.PythonUtils;
import scala.Tuple2;

/**
 * Starts the fork server of warm workers when an executor starts, so that the first job finds it
 * ready. Tasks look for a server of their own environment, so this process gives it the environment
 * of a Python worker of Spark.
 */
final class WarmServerStarter {
  /** Whether executors start the server. */
  static final String ON = "spark.farandole.warmWorkers";

  private static final String MODULE = "farandole.spark.job.prestart";
  private static final String PYTHON = "python";
  private static final String HASH_SEED = "PYTHONHASHSEED";
  private static final String PYTHON_PATH = "PYTHONPATH";
  private static final String EXECUTOR_ENV = "spark.executorEnv.";
  private static final long MAX_START_SECONDS = 60;

  private WarmServerStarter() {}

  /** Returns the driver's settings for executors; none if they start no server. */
  static Map<String, String> settings(UnaryOperator<String> conf, Map<String, String> driver) {
    if (!"true".equalsIgnoreCase(conf.apply(ON))) {
      return Collections.emptyMap();
    }
    // The same choice as in pyspark: its driver names the interpreter of all Python workers.
    String named = conf.apply("spark.pyspark.python");
    Map<String, String> driverSettings = new HashMap<>();
    driverSettings.put(PYTHON, driver.getOrDefault("PYSPARK_PYTHON", named == null ? "python3" : named));
    driverSettings.put(HASH_SEED, driver.getOrDefault(HASH_SEED, "0"));
    return driverSettings;
  }

  /** Starts the server in the background, if the driver's settings say so. */
  static void start(SparkConf conf, Map<String, String> driverSettings) {
    String python = driverSettings == null ? null : driverSettings.get(PYTHON);
    if (python != null) {
      Thread thread = new Thread(() -> FailureGuard.attempt("no fork server of warm workers was started",
          () -> run(python, environment(executorEnv(conf), driverSettings, System.getenv(), PythonUtils.sparkPythonPath()))));
      thread.setName("farandole-warm-workers");
      thread.setDaemon(true);
      thread.start();
    }
  }

  /**
   * Returns the variables that Spark sets for its Python workers and on which the imports of a server
   * depend.
   */
  static Map<String, String> environment(
      Map<String, String> asked, Map<String, String> driverSettings, Map<String, String> own, String sparks) {
    Map<String, String> set = new HashMap<>(asked);
    List<String> paths = new ArrayList<>();
    for (String path : new String[] {sparks, set.get(PYTHON_PATH), own.get(PYTHON_PATH)}) {
      if (path != null && !path.isEmpty()) {
        paths.add(path);
      }
    }
    set.put(PYTHON_PATH, String.join(java.io.File.pathSeparator, paths));
    set.put("PYTHONUNBUFFERED", "YES");
    set.put(HASH_SEED, driverSettings.get(HASH_SEED));
    return set;
  }

  private static Map<String, String> executorEnv(SparkConf conf) {
    Map<String, String> asked = new HashMap<>();
    for (Tuple2<String, String> one : conf.getAllWithPrefix(EXECUTOR_ENV)) {
      asked.put(one._1(), one._2());
    }
    return asked;
  }

  private static void run(String python, Map<String, String> set) throws Exception {
    String self = LeftoverWorkers.self();
    if (self == null) {
      return;
    }
    ProcessBuilder builder = new ProcessBuilder(python, "-m", MODULE, self, SparkFiles.getRootDirectory());
    builder.environment().putAll(set);
    Process process = builder.redirectErrorStream(true).start();
    process.getOutputStream().close();
    if (!process.waitFor(MAX_START_SECONDS, TimeUnit.SECONDS)) {
      process.destroyForcibly();
      throw new IllegalStateException(MODULE + " took more than " + MAX_START_SECONDS + " s");
    }
    if (process.exitValue() != 0) {
      throw new IllegalStateException(python + " -m " + MODULE + ": " + lastLine(process));
    }
  }

  private static String lastLine(Process process) throws Exception {
    try (BufferedReader lines =
        new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8))) {
      List<String> all = lines.lines().collect(Collectors.toList());
      return all.isEmpty() ? "exit status " + process.exitValue() : all.get(all.size() - 1);
    }
  }
}
