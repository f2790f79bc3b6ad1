# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The mapping from columns to tensors and from labels to a loss, and its checks on the driver."""
