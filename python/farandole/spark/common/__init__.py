# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What estimators of every framework share: backends, stores, parameters, data preparation."""
