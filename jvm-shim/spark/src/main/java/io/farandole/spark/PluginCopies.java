// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.Collections;

/** Warns if several jars of this plugin are on the class path: the JVM uses one of them, in no fixed order. */
final class PluginCopies {
  private PluginCopies() {}

  static void warnOfTwo() throws Exception {
    String name = FarandolePlugin.class.getName().replace('.', '/') + ".class";
    ClassLoader loader = Thread.currentThread().getContextClassLoader();
    ClassLoader used = loader == null ? FarandolePlugin.class.getClassLoader() : loader;
    java.util.Set<String> places = new java.util.TreeSet<>();
    for (java.net.URL one : Collections.list(used.getResources(name))) {
      places.add(one.toString());
    }
    if (places.size() > 1) {
      FailureGuard.warn("the plugin is on the class path more than once, and one of these is used: " + places);
    }
  }
}
