// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.lang.reflect.Method;
import java.nio.file.Path;
import java.util.function.Function;
import org.apache.spark.ui.SparkUI;
import org.apache.spark.ui.SparkUITab;

/** The tab's name and link in Spark's pages; the link opens a servlet of this plugin. */
public final class TrainingTab extends SparkUITab {
  static final String PREFIX = "training";

  private TrainingTab(SparkUI ui) {
    super(ui, PREFIX);
  }

  @Override
  public String name() {
    return "Training";
  }

  /** Adds tab and page to a UI, of a live application or of the History Server. */
  static void attach(SparkUI ui, Function<String, Path> timelines) throws Exception {
    TrainingPage page = new TrainingPage(ui, timelines);
    for (Method method : ui.getClass().getMethods()) {
      // By reflection, and by what it takes: the servlet API differs between versions of Spark,
      // both may be on the class path, and an overload names a class of Jetty's.
      if (method.getName().equals("attachHandler") && method.getParameterCount() == 3) {
        boolean jakarta = method.getParameterTypes()[1].getName().startsWith("jakarta.");
        Object servlet = jakarta ? new JakartaServlet(page) : new JavaxServlet(page);
        method.invoke(ui, ui.getBasePath() + "/" + PREFIX, servlet, "/*");
        ui.attachTab(new TrainingTab(ui));
        return;
      }
    }
    throw new NoSuchMethodException("SparkUI.attachHandler of a path, a servlet and a pattern");
  }
}
