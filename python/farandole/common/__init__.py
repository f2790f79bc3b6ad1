# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Code shared by the modules of all frameworks: exceptions, process sets, the session of `init`."""
