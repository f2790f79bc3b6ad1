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
 * An executor's half: says what its host has, starts the fork server of warm workers, and ends the
 * workers that are left when the executor ends.
 */
final class ExecutorHalf implements ExecutorPlugin {
  @Override
  public void init(PluginContext context, Map<String, String> extra) {
    Guard.attempt(
        "the driver was not told of this executor's host",
        () -> {
          // Without `context.hostname()`: Spark fails there in an executor other than the driver,
          // which serves no RPC. The listener knows the host.
          String body =
              Json.object(
                  "memory", memory(),
                  "processors", "" + Runtime.getRuntime().availableProcessors(),
                  "gpus", String.join(", ", gpus(Paths.get("/proc/driver/nvidia/gpus"))),
                  "pid", Orphans.self());
          context.send(context.executorID() + "\n" + body);
        });
    Guard.attempt("no fork server of warm workers was started", () -> WarmServer.start(context.conf(), extra));
  }

  @Override
  public void shutdown() {
    Guard.attempt("workers may be left on this host", Orphans::end);
  }

  /**
   * The host's memory, as the kernel writes it, such as {@code 65842340 kB}; null where nobody
   * says.
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
