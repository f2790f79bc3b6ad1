# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Log callbacks for Keras, under the name that Databricks gave them."""
