// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package farandole;

import java.io.BufferedReader;
import java.io.File;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.security.PrivilegedExceptionAction;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.MiniDFSNNTopology;
import org.apache.hadoop.minikdc.MiniKdc;
import org.apache.hadoop.security.UserGroupInformation;

/**
 * Name nodes and two data nodes in a directory: prints {@code READY <url>} and ends when its
 * standard input does.
 *
 * <p>What clients need to know lies in {@code client/} there, as a {@code HADOOP_CONF_DIR}. The kinds are {@code plain},
 * {@code available} (a name service of two name nodes) and {@code secure}, which also wants the
 * word for how traffic is protected: Kerberos with its key distribution centre, a key table of the
 * user {@code alice}, a directory of hers and one of others. Lines on the standard input change who
 * is in charge: {@code rest N}, {@code lead N}, {@code kill N}; each is answered with {@code DONE}.
 */
public final class MiniDfs {
  private static final String SERVICE = "chain";

  private MiniDfs() {}

  /** Starts a cluster below the first argument, of the kind that is the second. */
  public static void main(String[] arguments) throws Exception {
    File place = new File(arguments[0]).getAbsoluteFile();
    switch (arguments[1]) {
      case "plain" -> plain(place);
      case "available" -> available(place);
      case "secure" -> secure(place, arguments[2]);
      default -> throw new IllegalArgumentException("plain, available or secure, not " + arguments[1]);
    }
  }

  private static void plain(File place) throws Exception {
    Configuration configuration = new Configuration();
    configuration.set("dfs.permissions.enabled", "true");
    try (MiniDFSCluster cluster = builder(configuration, place).build()) {
      cluster.waitActive();
      keep(new Configuration(false), place);
      serve("hdfs://localhost:" + cluster.getNameNodePort(), cluster);
    }
  }

  private static void available(File place) throws Exception {
    Configuration configuration = new Configuration();
    configuration.set("dfs.ha.tail-edits.period.backoff-max", "0");
    configuration.set("dfs.ha.tail-edits.period", "1s");
    MiniDFSNNTopology topology =
        new MiniDFSNNTopology()
            .addNameservice(
                new MiniDFSNNTopology.NSConf(SERVICE)
                    .addNN(new MiniDFSNNTopology.NNConf("first"))
                    .addNN(new MiniDFSNNTopology.NNConf("second")));
    try (MiniDFSCluster cluster = builder(configuration, place).nnTopology(topology).build()) {
      cluster.waitActive();
      cluster.transitionToActive(0);
      Configuration client = new Configuration(false);
      client.set("fs.defaultFS", "hdfs://" + SERVICE);
      client.set("dfs.nameservices", SERVICE);
      client.set("dfs.ha.namenodes." + SERVICE, "first,second");
      client.set(
          "dfs.client.failover.proxy.provider." + SERVICE,
          "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider");
      for (int node = 0; node < 2; node++) {
        String name = node == 0 ? "first" : "second";
        String address = "localhost:" + cluster.getNameNodePort(node);
        client.set("dfs.namenode.rpc-address." + SERVICE + "." + name, address);
      }
      keep(client, place);
      serve("hdfs://" + SERVICE, cluster);
    }
  }

  private static void secure(File place, String protection) throws Exception {
    File kerberos = new File(place, "kerberos");
    kerberos.mkdirs();
    MiniKdc centre = new MiniKdc(MiniKdc.createConf(), kerberos);
    centre.start();
    try {
      File services = new File(kerberos, "services.keytab");
      centre.createPrincipal(services, "hdfs/localhost", "HTTP/localhost");
      centre.createPrincipal(new File(kerberos, "alice.keytab"), "alice");
      String realm = "@" + centre.getRealm();
      Configuration configuration = new Configuration();
      configuration.set("hadoop.security.authentication", "kerberos");
      configuration.set("hadoop.security.authorization", "true");
      for (String node : new String[] {"namenode", "datanode"}) {
        configuration.set("dfs." + node + ".kerberos.principal", "hdfs/localhost" + realm);
        configuration.set("dfs." + node + ".keytab.file", services.getPath());
      }
      configuration.set("dfs.web.authentication.kerberos.principal", "HTTP/localhost" + realm);
      configuration.set("dfs.web.authentication.kerberos.keytab", services.getPath());
      configuration.set("dfs.block.access.token.enable", "true");
      configuration.set("dfs.data.transfer.protection", protection);
      configuration.set("hadoop.rpc.protection", protection);
      // Data nodes ask for ports below 1024 or for HTTPS; their data is protected by SASL all the
      // same.
      configuration.setBoolean("ignore.secure.ports.for.testing", true);
      UserGroupInformation.setConfiguration(configuration);
      UserGroupInformation.loginUserFromKeytab("hdfs/localhost" + realm, services.getPath());
      try (MiniDFSCluster cluster = builder(configuration, place).build()) {
        cluster.waitActive();
        FileSystem files = cluster.getFileSystem();
        directory(files, "/of-alice", "alice", (short) 0700);
        directory(files, "/of-others", "hdfs", (short) 0700);
        Configuration client = new Configuration(false);
        String url = "hdfs://localhost:" + cluster.getNameNodePort();
        client.set("fs.defaultFS", url);
        client.set("hadoop.security.authentication", "kerberos");
        client.set("dfs.data.transfer.protection", protection);
        client.set("hadoop.rpc.protection", protection);
        client.set("dfs.namenode.kerberos.principal", "hdfs/localhost" + realm);
        keep(client, place);
        Files.copy(centre.getKrb5conf().toPath(), new File(kerberos, "krb5.conf").toPath());
        serve(url, cluster);
      }
    } finally {
      centre.stop();
    }
  }

  private static MiniDFSCluster.Builder builder(Configuration configuration, File place) {
    return new MiniDFSCluster.Builder(configuration, place).numDataNodes(2);
  }

  private static void directory(FileSystem files, String path, String owner, short mode) throws Exception {
    Path place = new Path(path);
    UserGroupInformation.getLoginUser()
        .doAs(
            (PrivilegedExceptionAction<Void>)
                () -> {
                  files.mkdirs(place);
                  files.setPermission(place, new FsPermission(mode));
                  files.setOwner(place, owner, owner);
                  return null;
                });
  }

  private static void keep(Configuration client, File place) throws Exception {
    File directory = new File(place, "client");
    directory.mkdirs();
    try (OutputStream file = new FileOutputStream(new File(directory, "core-site.xml"))) {
      client.writeXml(file);
    }
  }

  private static void serve(String url, MiniDFSCluster cluster) throws Exception {
    System.out.println("READY " + url);
    // Whoever started this process holds the other end.
    BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String order = orders.readLine(); order != null; order = orders.readLine()) {
      String[] words = order.split(" ");
      int node = words.length > 1 ? Integer.parseInt(words[1]) : -1;
      switch (words[0]) {
        case "rest" -> cluster.transitionToStandby(node);
        case "lead" -> cluster.transitionToActive(node);
        case "kill" -> cluster.shutdownNameNode(node);
        default -> throw new IllegalArgumentException("rest, lead or kill, not " + order);
      }
      System.out.println("DONE");
    }
  }
}
