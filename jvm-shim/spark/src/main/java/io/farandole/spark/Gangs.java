// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;

/**
 * Which stages run the tasks of a gang: their jobs have a tag that begins with {@code farandole-}.
 */
final class Gangs {
  private static final String TAGS = "spark.job.tags";
  private static final String PREFIX = "farandole-";

  private final Map<Integer, String> tags = new ConcurrentHashMap<>();

  /** The gang's tag; null for the stages of others. */
  String submitted(SparkListenerStageSubmitted event) {
    Properties properties = event.properties();
    String all = properties == null ? null : properties.getProperty(TAGS);
    if (all != null) {
      for (String one : all.split(",")) {
        if (one.startsWith(PREFIX)) {
          tags.put(event.stageInfo().stageId(), one);
          return one;
        }
      }
    }
    return null;
  }

  void completed(SparkListenerStageCompleted event) {
    tags.remove(event.stageInfo().stageId());
  }

  /** The tag of a stage that runs; null for those of others. */
  String tag(int stage) {
    return tags.get(stage);
  }
}
