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

/** The plugin in the driver: listens to Spark, stores rows of the Python driver, and shows the tab. */
final class DriverSide implements DriverPlugin {
  private static final String QUEUE = "farandole";

  private final DriverEventQueue news = new DriverEventQueue();
  private final RunGauges gauges = new RunGauges();
  private final Map<String, Path> timelines = new ConcurrentHashMap<>();
  private SparkContext context;
  private DecommissionWatcher decommissions;

  @Override
  public Map<String, String> init(SparkContext made, PluginContext plugin) {
    FailureGuard.attempt(
        "the plugin does not see what Spark does",
        () -> {
          PluginCopies.warnOfTwo();
          context = made;
          decommissions = new DecommissionWatcher(made, this::decommissioned);
          listen(new DriverEventListener(news, decommissions));
          listen(new TrainingListener(new TrainingRows(made.statusStore().store())));
          DriverGateway.driver = this;
        });
    return FailureGuard.valueOrElse(
        "executors start no fork servers of warm workers",
        Collections.<String, String>emptyMap(),
        () -> WarmServerStarter.settings(name -> made.getConf().get(name, null), System.getenv()));
  }

  @Override
  public void registerMetrics(String application, PluginContext plugin) {
    FailureGuard.attempt("there are no metrics", () -> gauges.register(plugin.metricRegistry()));
    FailureGuard.attempt(
        "there is no Training tab",
        () -> {
          if (context != null && context.ui().isDefined()) {
            TrainingTab.attach(context.ui().get(), timelines::get);
          }
        });
    FailureGuard.attempt("decommissioned executors are not watched", () -> decommissions.start());
  }

  /** Stores the description of an executor's host. */
  @Override
  public Object receive(Object message) {
    FailureGuard.attempt(
        "an executor's host was not kept",
        () -> {
          String[] parts = ((String) message).split("\n", 2);
          post("", "host/" + parts[0], parts[1], true);
        });
    return null;
  }

  @Override
  public void shutdown() {
    FailureGuard.attempt(
        "the plugin did not end",
        () -> {
          if (DriverGateway.driver == this) {
            DriverGateway.driver = null;
          }
          if (decommissions != null) {
            decommissions.end();
          }
        });
  }

  void post(String run, String key, String body, boolean logged) {
    context.listenerBus().post(new TrainingEvent(run, key, body, logged));
  }

  DriverEventQueue news() {
    return news;
  }

  RunGauges gauges() {
    return gauges;
  }

  void timeline(String run, String path) {
    timelines.put(run, Paths.get(path));
  }

  private void decommissioned(String executor) {
    news.add(JsonText.object("kind", "decommissioning", "executor", executor));
    post("", "decommissioning/" + executor, JsonText.object("time", "" + System.currentTimeMillis()), true);
  }

  private void listen(SparkListenerInterface listener) {
    // An own queue, because listeners of other plugins may be slow, and must not wait for ours.
    context.listenerBus().addToQueue(listener, QUEUE);
  }
}
