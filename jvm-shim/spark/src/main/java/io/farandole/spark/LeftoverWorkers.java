// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * Ends workers that outlive their tasks. Normally the kernel ends a worker with its agent; an
 * executor may end before that is set up. Only descendants of this process that run
 * {@code farandole.runner} are ended.
 */
final class LeftoverWorkers {
  private static final String MARK = "farandole.runner.";

  private LeftoverWorkers() {}

  /** This process's number; null where there is no /proc. */
  static String self() throws Exception {
    Path self = Paths.get("/proc/self");
    return Files.exists(self) ? self.toRealPath().getFileName().toString() : null;
  }

  static void end() throws Exception {
    String self = self();
    if (self == null) {
      return;
    }
    for (String process : workers(self, Paths.get("/proc"))) {
      new ProcessBuilder("kill", "-KILL", process).start().waitFor();
    }
  }

  /** The descendants of a process that are workers. */
  static List<String> workers(String of, Path proc) throws Exception {
    Map<String, String> parents = new HashMap<>();
    File[] entries = proc.toFile().listFiles((folder, name) -> name.matches("[0-9]+"));
    for (File entry : entries == null ? new File[0] : entries) {
      String stat = read(entry.toPath().resolve("stat"));
      if (!stat.isEmpty()) {
        // The name in parentheses may hold anything; state and parent follow it.
        parents.put(entry.getName(), stat.substring(stat.lastIndexOf(')') + 2).split(" ")[1]);
      }
    }
    List<String> found = new ArrayList<>();
    for (String process : parents.keySet()) {
      if (descends(process, of, parents) && read(proc.resolve(process).resolve("cmdline")).contains(MARK)) {
        found.add(process);
      }
    }
    return found;
  }

  private static boolean descends(String process, String of, Map<String, String> parents) {
    String at = parents.get(process);
    for (int steps = 0; at != null && steps < parents.size(); steps++) {
      if (at.equals(of)) {
        return true;
      }
      at = parents.get(at);
    }
    return false;
  }

  private static String read(Path file) {
    try {
      return new String(Files.readAllBytes(file), StandardCharsets.UTF_8);
    } catch (java.io.IOException gone) {
      return ""; // the process has ended
    }
  }
}
