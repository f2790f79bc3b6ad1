// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.DataInputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;

/**
 * What the classes of the jar name: nothing that differs between versions of Spark and their
 * vendors.
 */
class JarTest {
  private static final Path CLASSES = Paths.get("target", "classes");
  private static final int JAVA_8 = 52;

  @Test
  void classesAreForJava8() throws IOException {
    for (Path one : classes()) {
      try (DataInputStream in = new DataInputStream(Files.newInputStream(one))) {
        in.readInt();
        in.readUnsignedShort();
        assertEquals(JAVA_8, in.readUnsignedShort(), one.toString());
      }
    }
  }

  @Test
  void noClassNamesWhatVendorsChange() throws IOException {
    for (Path one : classes()) {
      for (String text : constants(one)) {
        for (String other : new String[] {"json4s", "scala/xml", "jetty", "com/fasterxml"}) {
          assertFalse(text.contains(other), one + " names " + text);
        }
        assertFalse(text.contains("$default$"), one + " calls a helper for a default argument: " + text);
        assertFalse(text.contains(")Lscala/collection/Seq;") && text.startsWith("(")
            && !one.endsWith("HistoryPlugin.class"), one + " has a method whose type differs in Scala 2.13: " + text);
      }
    }
  }

  @Test
  void eachServletApiIsNamedByOneClass() throws IOException {
    for (String api : new String[] {"javax/servlet", "jakarta/servlet"}) {
      List<String> naming = new ArrayList<>();
      for (Path one : classes()) {
        if (constants(one).stream().anyMatch(text -> text.contains(api))) {
          naming.add(one.getFileName().toString());
        }
      }
      String only = api.startsWith("javax") ? "JavaxServlet.class" : "JakartaServlet.class";
      assertEquals(List.of(only), naming);
    }
  }

  @Test
  void theHistoryPluginHasTheSignatureOfBothScalas() {
    List<String> types =
        Stream.of(HistoryPlugin.class.getMethods())
            .filter(method -> method.getName().equals("createListeners"))
            .map(method -> method.getReturnType().getName())
            .sorted()
            .collect(Collectors.toList());
    assertTrue(types.contains("scala.collection.Seq"), types.toString());
    assertTrue(types.contains("scala.collection.immutable.Seq"), types.toString());
  }

  private static List<Path> classes() throws IOException {
    try (Stream<Path> all = Files.walk(CLASSES)) {
      List<Path> found = all.filter(one -> one.toString().endsWith(".class")).collect(Collectors.toList());
      assertTrue(found.size() > 10, "classes are looked for in the wrong place: " + found);
      return found;
    }
  }

  /**
   * All text in a class file's table of constants: names of classes, of members, and their types.
   */
  private static List<String> constants(Path path) throws IOException {
    List<String> found = new ArrayList<>();
    try (DataInputStream in = new DataInputStream(Files.newInputStream(path))) {
      in.readInt();
      in.readUnsignedShort();
      in.readUnsignedShort();
      int count = in.readUnsignedShort();
      for (int at = 1; at < count; at++) {
        int kind = in.readUnsignedByte();
        switch (kind) {
          case 1:
            found.add(in.readUTF());
            break;
          case 5:
          case 6:
            in.readLong();
            at++; // these take two places
            break;
          case 7:
          case 8:
          case 16:
          case 19:
          case 20:
            in.readUnsignedShort();
            break;
          case 15:
            in.readUnsignedByte();
            in.readUnsignedShort();
            break;
          default:
            in.readInt();
        }
      }
    }
    return found;
  }
}
