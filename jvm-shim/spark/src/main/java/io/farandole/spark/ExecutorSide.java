// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.io.BufferedReader;
import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.PluginContext;

/**
 * The plugin in an executor: describes its host, starts the fork server of warm workers, and ends
 * workers that are left when the executor ends.
 */
final class ExecutorSide implements ExecutorPlugin {
  @Override
  public void init(PluginContext context, Map<String, String> extra) {
    FailureGuard.attempt(
        "the driver has no description of this executor's host",
        () -> {
          // Without `context.hostname()`: Spark fails there in an executor other than the driver,
          // which serves no RPC. The listener knows the host.
          String body =
              JsonText.object(
                  "memory", memory(),
                  "processors", "" + Runtime.getRuntime().availableProcessors(),
                  "gpus", String.join(", ", gpus(Paths.get("/proc/driver/nvidia/gpus"))),
                  "pid", LeftoverWorkers.self());
          context.send(context.executorID() + "\n" + body);
        });
    FailureGuard.attempt("no fork server of warm workers was started", () -> WarmServerStarter.start(context.conf(), extra));
  }

  @Override
  public void shutdown() {
    FailureGuard.attempt("workers may be left on this host", LeftoverWorkers::end);
  }

  /**
   * Returns the host's memory as the kernel writes it, such as {@code 65842340 kB}; null if the
   * kernel does not show it.
   */
  private static String memory() throws Exception {
    Path info = Paths.get("/proc/meminfo");
    if (!Files.isReadable(info)) {
      return null;
    }
    try (BufferedReader lines = Files.newBufferedReader(info, StandardCharsets.UTF_8)) {
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        if (line.startsWith("MemTotal:")) {
          return line.substring("MemTotal:".length()).trim();
        }
      }
    }
    return null;
  }

  /** The models of the NVIDIA GPUs that the kernel's driver knows. */
  static List<String> gpus(Path driver) throws Exception {
    List<String> models = new ArrayList<>();
    File[] found = driver.toFile().listFiles();
    if (found != null) {
      java.util.Arrays.sort(found);
      for (File one : found) {
        for (String line : Files.readAllLines(one.toPath().resolve("information"), StandardCharsets.UTF_8)) {
          if (line.startsWith("Model:")) {
            models.add(line.substring("Model:".length()).trim());
          }
        }
      }
    }
    return models;
  }
}
