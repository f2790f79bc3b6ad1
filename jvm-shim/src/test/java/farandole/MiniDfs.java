// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package farandole;

import java.io.File;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/**
 * One name node and two data nodes in a directory: prints {@code READY <url>} and ends when its standard input does.
 */
public final class MiniDfs {
  private MiniDfs() {}

  /** Starts the cluster below the directory that is the one argument. */
  public static void main(String[] arguments) throws Exception {
    Configuration configuration = new Configuration();
    configuration.set("dfs.permissions.enabled", "true");
    try (MiniDFSCluster cluster =
        new MiniDFSCluster.Builder(configuration, new File(arguments[0])).numDataNodes(2).build()) {
      cluster.waitActive();
      cluster.getFileSystem().mkdirs(new org.apache.hadoop.fs.Path("/user/test"));
      System.out.println("READY hdfs://localhost:" + cluster.getNameNodePort());
      while (System.in.read() >= 0) {
        // Whoever started this process holds the other end.
      }
    }
  }
}
