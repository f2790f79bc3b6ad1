// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.Collections;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.SparkContext;
import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.PluginContext;
import org.apache.spark.scheduler.SparkListenerInterface;

/** The driver's half: listens to Spark, keeps what the Python driver tells, and shows the tab. */
final class DriverHalf implements DriverPlugin {
  private static final String QUEUE = "farandole";

  private final News news = new News();
  private final Gauges gauges = new Gauges();
  private final Map<String, Path> timelines = new ConcurrentHashMap<>();
  private SparkContext context;
  private Decommissions decommissions;

  @Override
  public Map<String, String> init(SparkContext made, PluginContext plugin) {
    Guard.attempt(
        "the plugin does not see what Spark does",
        () -> {
          Copies.warnOfTwo();
          context = made;
          decommissions = new Decommissions(made, this::decommissioned);
          listen(new NewsListener(news, decommissions));
          listen(new TrainingListener(new Rows(made.statusStore().store())));
          Trainings.driver = this;
        });
    return Guard.made(
        "executors start no fork servers of warm workers",
        Collections.<String, String>emptyMap(),
        () -> WarmServer.settings(name -> made.getConf().get(name, null), System.getenv()));
  }

  @Override
  public void registerMetrics(String application, PluginContext plugin) {
    Guard.attempt("there are no metrics", () -> gauges.register(plugin.metricRegistry()));
    Guard.attempt(
        "there is no Training tab",
        () -> {
          if (context != null && context.ui().isDefined()) {
            TrainingTab.attach(context.ui().get(), timelines::get);
          }
        });
    Guard.attempt("decommissioned executors are not watched", () -> decommissions.start());
  }

  /** What an executor's half says of its host. */
  @Override
  public Object receive(Object message) {
    Guard.attempt(
        "an executor's host was not kept",
        () -> {
          String[] parts = ((String) message).split("\n", 2);
          post("", "host/" + parts[0], parts[1], true);
        });
    return null;
  }

  @Override
  public void shutdown() {
    Guard.attempt(
        "the plugin did not end",
        () -> {
          if (Trainings.driver == this) {
            Trainings.driver = null;
          }
          if (decommissions != null) {
            decommissions.end();
          }
        });
  }

  void post(String run, String key, String body, boolean logged) {
    context.listenerBus().post(new TrainingEvent(run, key, body, logged));
  }

  News news() {
    return news;
  }

  Gauges gauges() {
    return gauges;
  }

  void timeline(String run, String path) {
    timelines.put(run, Paths.get(path));
  }

  private void decommissioned(String executor) {
    news.add(Json.object("kind", "decommissioning", "executor", executor));
    post("", "decommissioning/" + executor, Json.object("time", "" + System.currentTimeMillis()), true);
  }

  private void listen(SparkListenerInterface listener) {
    // A queue of our own: listeners of others may be slow, and are not to wait for ours either.
    context.listenerBus().addToQueue(listener, QUEUE);
  }
}
