# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What every framework's module shares: exceptions, process sets, the session behind `init`."""
