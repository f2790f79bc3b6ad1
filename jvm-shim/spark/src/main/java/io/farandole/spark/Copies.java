// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.util.Collections;

/** More than one jar of this plugin on the class path: which one is taken is chance. */
final class Copies {
  private Copies() {}

  static void warnOfTwo() throws Exception {
    String name = FarandolePlugin.class.getName().replace('.', '/') + ".class";
    ClassLoader loader = Thread.currentThread().getContextClassLoader();
    ClassLoader used = loader == null ? FarandolePlugin.class.getClassLoader() : loader;
    java.util.Set<String> places = new java.util.TreeSet<>();
    for (java.net.URL one : Collections.list(used.getResources(name))) {
      places.add(one.toString());
    }
    if (places.size() > 1) {
      Guard.warn("the plugin is on the class path more than once, and one of these is used: " + places);
    }
  }
}
