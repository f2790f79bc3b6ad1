// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;

/**
 * The running stages of gangs. The jobs of such stages have a tag that begins with
 * {@code farandole-}.
 */
final class GangStages {
  private static final String TAGS = "spark.job.tags";
  private static final String PREFIX = "farandole-";

  private final Map<Integer, String> tags = new ConcurrentHashMap<>();

  /** Returns the gang's tag; null for a stage of another job. */
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

  /** Returns the tag of a running stage; null for a stage of another job. */
  String tag(int stage) {
    return tags.get(stage);
  }
}
