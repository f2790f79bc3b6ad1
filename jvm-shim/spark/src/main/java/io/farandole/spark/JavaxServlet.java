// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
package io.farandole.spark;

import java.io.IOException;
import javax.servlet.http.HttpServlet;
import javax.servlet.http.HttpServletRequest;
import javax.servlet.http.HttpServletResponse;

/** {@link TrainingPage} as a servlet of {@code javax}; no other class of the jar names it. */
public final class JavaxServlet extends HttpServlet {
  private static final long serialVersionUID = 1L;

  private final transient TrainingPage page;

  JavaxServlet(TrainingPage page) {
    this.page = page;
  }

  @Override
  protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
    TrainingPage.Answer answer = page.answer(request.getPathInfo(), request::getParameter);
    response.setStatus(answer.status);
    TrainingPage.HEADERS.forEach(response::setHeader);
    response.setContentType(answer.type);
    if (answer.name != null) {
      response.setHeader("Content-Disposition", "attachment; filename=" + answer.name);
    }
    answer.write(response.getOutputStream());
  }
}
