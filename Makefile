# All commands of the project. `make demo` and `make test` install everything that they need.
PYTHON ?= python3
VENV := .venv
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
BIN := $(VENV)/bin
SOURCES := $(shell find crates python -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name Cargo.toml -o -name '*.proto') Cargo.toml Cargo.lock pyproject.toml
# All builds of the extension use one interpreter, so the wheel, the tests and the lints share what
# cargo built.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# Spark's Python workers use this environment.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python

.PHONY: demo test test-jobs test-rest test-timing flaky test-spark test-storage test-launch test-scale test-trust trust-soaks trust-rest test-ray chaos packages tensorflow-ops test-faults test-parity test-readers test-clients test-newest test-torch test-models loom fuzz sanitize lint bench gpu-check shim viewer test-ui screenshots wheel install bytecode tools deny docs links size release release-again clean

# Packages that the wheel is built and used with. In a new environment, `make demo` installs only
# those that it needs. All other targets install all.
ifeq ($(MAKECMDGOALS)$(wildcard $(VENV)/.packages),demo)
PACKAGES := $(VENV)/.few
else
PACKAGES := $(VENV)/.packages
endif

demo: install
	$(BIN)/python examples/spark_torch_digits.py

# JVMs of tests live for seconds. The JIT's C2 compiler costs more processor time than it saves in
# such short runs (one short session: 24 s of processor time with it, 14 s without).
test test-spark test-models: export JAVA_TOOL_OPTIONS := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC

# Deadlines are short and machines are shared, so a failed test runs once more, with a message.
# Python tests spend half of their time waiting, so two halves run in parallel. The output of each
# half appears when it has ended.
test: bytecode loom
	.ci/rust-tests
	@echo "make test: the tests in Python, in two halves side by side"
	$(MAKE) --no-print-directory -j2 --output-sync=target test-jobs test-rest
	$(MAKE) --no-print-directory test-timing

# Tests that start clusters and jobs as users do. `test-rest` runs all others. Tests whose result
# depends on the speed of the machine run afterwards, alone.
# Tests of other projects have environments of their own and targets of their own.
OWN_ENVIRONMENTS := tests/clients tests/torch_users
JOBS := $(addprefix tests/,spark ray storage launcher launch trust chaos faults notebooks ui)
test-jobs:
	$(BIN)/python -m pytest $(JOBS) -m "not slow and not timing" --reruns 1 --durations=25

test-rest:
	$(BIN)/python -m pytest tests $(addprefix --ignore=,$(JOBS) $(OWN_ENVIRONMENTS)) -m "not slow and not timing" --reruns 1 --durations=25

test-timing:
	$(BIN)/python -m pytest tests $(addprefix --ignore=,$(OWN_ENVIRONMENTS)) -m "timing and not slow" --reruns 1 --durations=10

# The tests of both halves several times over, each test once a round: a test that fails in one round
# of ten is a bug of the product or of the test. Prints how often each test failed; the output of the
# rounds is in target/flaky. A round takes more than an hour, and FLAKY=tests/elastic less.
ROUNDS := 10
FLAKY := tests
flaky: bytecode
	mkdir -p target/flaky && rm -f target/flaky/*
	for round in `seq $(ROUNDS)`; do \
	$(BIN)/python -m pytest $(FLAKY) $(addprefix --ignore=,$(OWN_ENVIRONMENTS)) -m "not slow and not timing" > target/flaky/$$round.log 2>&1 \
	|| test $$? = 1 || echo "FAILED pytest ended by itself" >> target/flaky/$$round.log; done; \
	grep -hE '^(FAILED|ERROR) ' target/flaky/*.log | sed 's/ - .*//' | sort | uniq -c | sort -rn | tee target/flaky/failures; \
	tail -qn 1 target/flaky/*.log && test ! -s target/flaky/failures

# Ray on this host: static and elastic jobs, estimators, killed nodes. `test` runs the short tests
# of it.
test-ray: bytecode
	$(BIN)/python -m pytest tests/ray --reruns 1 --durations=10

# Jobs on several hosts (namespaces with a real sshd each), and jobs of other launchers. Needs root.
# If a program is missing, its tests are skipped and a message names it. Then the slow tests of jobs
# on this host, elastic ones too.
test-launch: bytecode packages .tools/kubeflow-trainer/ready
	$(BIN)/python -m pytest tests/launch --reruns 1 --durations=10
	$(BIN)/python -m pytest tests/launcher tests/parallel tests/elastic -m slow --reruns 1 --durations=10

# The schemas of Kubeflow Trainer, from its Go module.
.tools/kubeflow-trainer/ready: Makefile
	mkdir -p $(@D)
	cp `go mod download -json github.com/kubeflow/trainer/v2@v2.2.0 | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'`/manifests/base/crds/trainer.kubeflow.org_*.yaml $(@D)
	chmod u+w $(@D)/*.yaml
	touch $@

# An elastic job on four hosts (namespaces) under faults for 20 minutes. The report is
# target/chaos.json. `make test` does the same for 100 s. FARANDOLE_CHAOS_SEED selects other faults.
chaos: bytecode packages
	FARANDOLE_CHAOS_SECONDS=$${FARANDOLE_CHAOS_SECONDS:-1200} FARANDOLE_CHAOS_REPORT=$(CURDIR)/target/chaos.json \
	$(BIN)/python -m pytest tests/chaos

# Debian packages that some tests need.
packages:
	@.ci/packages

# The run viewer in a real browser, Debian's Chromium: a thousand runs, a million points, live runs.
# All notebooks, on a real Jupyter kernel. The timelines of all ranks. `test` has the short ones.
# The Training tab on Spark 4.1 and 4.2, which neither `test` nor `test-spark` has.
test-ui: bytecode packages .tools/pyspark-4.1/ready .tools/pyspark-4.2/ready
	$(MAKE) spark-plugin-4.1 spark-plugin-4.2
	$(BIN)/python -m pytest tests/ui tests/notebooks tests/launcher/test_timeline_of_ranks.py --reruns 1 --durations=10

# The pictures of the pages, of real fits in Debian's Chromium.
screenshots: install packages
	$(BIN)/python docs/screenshots.py

# loom tries all orders of memory operations in the shared ring and in the engine's threads. Runs
# again when these crates have changed.
LOOM := shm transport engine
loom: target/loom-passed
target/loom-passed: $(shell find $(addprefix crates/,$(LOOM) negotiation world) -name '*.rs' -o -name Cargo.toml) Cargo.lock Cargo.toml rust-toolchain.toml .ci/rustc-loom
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/.ci/rustc-loom cargo test --release $(addprefix -p farandole-,$(LOOM)) --lib loom_
	touch $@

# Feeds garbage to each target for a minute, with a new seed each time. `make test` takes a second
# each, with a fixed seed.
fuzz: export FARANDOLE_FUZZ_SECONDS ?= 60
fuzz: install
	cargo test --release -p farandole-fuzz --no-fail-fast
	$(BIN)/python -m pytest tests/trust/test_garbage.py

# The crates with unsafe code that needs no special process. AddressSanitizer checks shm, transport,
# kernels and collectives. Its runtime comes with the compiler, and RUSTC_BOOTSTRAP=1 allows the
# option without a nightly compiler. valgrind, if installed, checks shm, also for reads of
# uninitialized memory. It does not support `mremap` of a detached range (shm_6). Not covered:
# launcher's hook between fork and exec, telemetry's NVTX, and calls from Python, TensorFlow and
# CUDA through C.
sanitize:
	ASAN_OPTIONS=allocator_may_return_null=1 RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" \
	cargo test --release --target $(HOST) --target-dir target/asan \
	-p farandole-shm -p farandole-transport -p farandole-kernels -p farandole-collectives --lib --tests
	@command -v valgrind >/dev/null || echo "sanitize: without valgrind (Debian: apt-get install valgrind)"
	! command -v valgrind >/dev/null || RUSTFLAGS="--cfg rustix_use_libc" CARGO_BUILD_TARGET=$(HOST) \
	CARGO_TARGET_$(shell echo $(HOST) | tr a-z- A-Z_)_RUNNER="valgrind --quiet --error-exitcode=9 --fair-sched=yes" \
	cargo test --target-dir target/valgrind -p farandole-shm --lib --tests -- --skip shm_6

# All readers against pyarrow and Spark: types x writers x shapes, and Spark's settings. `test` tries
# each hundredth cell. Tables of Delta and Iceberg, written by Spark 4.1: the newest version for
# which both have a release. At most ten minutes.
test-readers: bytecode .tools/pyspark-4.1/ready .tools/table-jars/ready
	$(BIN)/python -m pytest tests/readers tests/spark/test_reading_as_spark.py -m "slow or not slow" --durations=10

# Stores against real services: S3 as in `test`, and GCS, Azure and HDFS, with and without Kerberos,
# which this target installs below .tools.
test-storage: bytecode packages .tools/azurite .tools/bin/fake-gcs-server jvm-shim/target/classpath .tools/s3proxy/classpath
	$(BIN)/python -m pytest tests/storage

.tools/azurite:
	npm install --silent --prefix $@ azurite@3.37.0

# An S3 service with its objects in files.
.tools/s3proxy/classpath: jvm-shim/s3proxy/pom.xml
	mvn -q -B -f $< dependency:build-classpath -Dmdep.outputFile=$(CURDIR)/$@

.tools/bin/fake-gcs-server:
	GOBIN=$(CURDIR)/.tools/bin go install github.com/fsouza/fake-gcs-server@v1.56.1

jvm-shim/target/classpath: jvm-shim/pom.xml $(wildcard jvm-shim/src/test/java/farandole/*.java)
	cd jvm-shim && mvn -q -B test-compile dependency:build-classpath -Dmdep.outputFile=target/classpath -Dmdep.includeScope=test

# Slow tests of Spark: clusters, killed executors, large results; and those of one process. Then the
# tests that depend on Spark run on older versions of pyspark, each in its own environment, which
# sees the other packages of this one. Two parts run in parallel, because they spend more than half
# of their time waiting.
SPARK_FACING := $(addprefix tests/spark/test_,run.py run_contract.py prepare.py deployments.py estimator.py torch_spark_ml.py plugin.py)
test-spark: bytecode .tools/pyspark-3.5/ready .tools/pyspark-4.0/ready
	@echo "test-spark: four parts, two at a time, for about half an hour; the output of each comes when it has ended"
	$(MAKE) -k -j2 --output-sync=target spark-slow-a-k spark-slow-l-z spark-older-3.5 spark-older-4.0

spark-slow-%:
	$(BIN)/python -m pytest $(foreach directory,spark single,tests/$(directory)/test_[$*]*.py) -m slow --reruns 1 --durations=30

spark-older-% spark-plugin-%: python = $(CURDIR)/.tools/pyspark-$*/bin/python
spark-older-%:
	PYSPARK_PYTHON=$(python) $(python) -m pytest $(SPARK_FACING) -m "not newest" --reruns 1 --durations=20

spark-plugin-%:
	PYSPARK_PYTHON=$(python) $(python) -m pytest tests/spark/test_plugin.py -m "not newest" -k "live_tab or links" --reruns 1

# pyspark 3.5 does not contain its Connect server, so the jar is downloaded: 3.5.7 is the last
# version with such a jar. The environment is created again if this file or the packages of the main
# environment have changed.
.tools/pyspark-%/ready: Makefile $(VENV)/.packages
	$(PYTHON) -m venv --without-pip --clear $(@D)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(@D)/bin/python "pyspark==$(if $(filter 3.5,$*),3.5.7,$*.*)"
	test $* != 3.5 || mvn -q -B dependency:copy -Dartifact=org.apache.spark:spark-connect_2.12:3.5.7 \
	-DoutputDirectory=`echo $(CURDIR)/$(@D)/lib/python*/site-packages/pyspark/jars`
	echo "import site; site.addsitedir('`echo $(CURDIR)/$(VENV)/lib/python*/site-packages`')" > `echo $(@D)/lib/python*/site-packages`/shared.pth
	touch $@

TABLE_JARS := io.delta:delta-spark_4.1_2.13:4.4.0 $(addsuffix :4.4.0,$(addprefix io.delta:delta-,storage kernel-api kernel-defaults kernel-unitycatalog)) \
io.unitycatalog:unitycatalog-client:0.6.0 org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0
.tools/table-jars/ready: Makefile
	for jar in $(TABLE_JARS); do mvn -q -B dependency:copy -Dartifact=$$jar -DoutputDirectory=$(CURDIR)/$(@D) || exit 1; done
	touch $@

# Programs of others that use Horovod, from the package index. They run unchanged on the drop-in, on
# small models with random weights. Each has an environment with its versions of everything, of 2 to
# 6 GB, which shares its files with uv's cache. At most half an hour.
CLIENTS := synapseml mlrun mlrun-keras kfmpi deepmd itwinai
test-clients: bytecode .tools/petastorm/ready $(CLIENTS:%=.tools/clients/%/ready)
	for client in $(CLIENTS); do \
	$(BIN)/uv pip install --quiet --no-deps --reinstall --python .tools/clients/$$client/bin/python dist/farandole*.whl || exit 1; done
	$(BIN)/python -m pytest tests/clients --durations=20

# The real petastorm, which tests compare farandole-petastorm with. Its reader needs a pyarrow and a
# NumPy of 2022. It uses the torch, TensorFlow and Spark of the main environment.
.tools/petastorm/ready: tests/clients/requirements/petastorm.txt $(VENV)/.packages
	$(PYTHON) -m venv --without-pip --clear $(@D)
	$(BIN)/uv pip install --quiet --no-deps --python $(@D)/bin/python -r $<
	echo "import site; site.addsitedir('`echo $(CURDIR)/$(VENV)/lib/python*/site-packages`')" > `echo $(@D)/lib/python*/site-packages`/shared.pth
	touch $@

.tools/clients/%/ready: tests/clients/requirements/%.txt | $(VENV)/.packages
	$(PYTHON) -m venv --without-pip --clear $(@D)
	$(BIN)/uv pip install --quiet --no-deps --python $(@D)/bin/python -r $<
	$(BIN)/uv cache prune --quiet
	touch $@

# torch.distributed, and the programs of others on it, also the slow tests. Then the tests of
# torch.distributed, Lightning, Accelerate and the Trainer on the oldest torch, whose environment sees
# the other packages of this one. At most half an hour.
TORCH_DISTRIBUTED := $(addprefix tests/parallel/test_,torch_distributed.py torch_distributed_groups.py torch_distributed_as_gloo.py)
TORCH_FACING := $(addprefix tests/,$(addprefix parallel/test_,as_gloo.py ddp_comm_hook.py torch_debug.py torch_reconfigure.py) elastic/test_tolerant_ddp.py launcher/test_transformers.py torch_users)
TORCH_SCRIPTS := $(addprefix tests/launcher/test_,script_pages.py transformers.py)
test-torch: bytecode .tools/torch-2.6/ready .tools/deepspeed/ready
	$(BIN)/python -m pytest $(TORCH_DISTRIBUTED) $(TORCH_FACING) -m "slow or not slow" --reruns 1 --durations=20
	.tools/torch-2.6/bin/python -m pytest $(TORCH_DISTRIBUTED) $(TORCH_SCRIPTS) -m "not newest and not slow" --reruns 1 --durations=20

.tools/torch-%/ready: Makefile $(VENV)/.packages
	$(PYTHON) -m venv --without-pip --clear $(@D)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(@D)/bin/python "torch==$*.*" torchvision
	echo "import site; site.addsitedir('`echo $(CURDIR)/$(VENV)/lib/python*/site-packages`')" > `echo $(@D)/lib/python*/site-packages`/shared.pth
	touch $@

# DeepSpeed comes as sources, whose build imports torch and would compile operations for GPUs.
.tools/deepspeed/ready: tests/torch_users/requirements/deepspeed.txt $(VENV)/.packages
	$(PYTHON) -m venv --without-pip --clear $(@D)
	echo "import site; site.addsitedir('`echo $(CURDIR)/$(VENV)/lib/python*/site-packages`')" > `echo $(@D)/lib/python*/site-packages`/shared.pth
	DS_BUILD_OPS=0 $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --python $(@D)/bin/python -r $<
	touch $@

# Estimators on checkpoints of text and of images, and the ways to predict with a fitted model: all
# their tests, also the slow ones, and the examples that pretrain a checkpoint. At most half an hour.
MODEL_KINDS := rates_by_name.py rate_range.py text_*.py token_classifier.py causal_*.py image_*.py torch_transformers.py torch_own_loss.py torch_model_calls.py
SERVING := host_weights.py model_functions.py exported_program.py exporting_page.py models_from_mlflow.py mlflow_models.py onnx_*.py
MODEL_TESTS = $(wildcard $(foreach directory,single spark parity,$(addprefix tests/$(directory)/test_,$(MODEL_KINDS) $(SERVING))))
test-models: bytecode
	$(BIN)/python -m pytest $(MODEL_TESTS) -m "slow or not slow" --reruns 1 --durations=20
	$(BIN)/python -m pytest tests/spark/test_examples.py -k checkpoint -m "slow or not slow" --reruns 1

# The tests of one package on its newest version, also if that is a release candidate: make
# test-newest PACKAGE=optuna. All other packages are those of the main environment.
test-newest: bytecode .tools/newest-$(PACKAGE)/ready
	.tools/newest-$(PACKAGE)/bin/python -m pip list | grep -i "^$(PACKAGE)"
	.tools/newest-$(PACKAGE)/bin/python -m pytest `$(BIN)/python docs/version_calendar.py tests $(PACKAGE)` \
	-m "not slow" --reruns 1 --durations=10

.tools/newest-%/ready: $(VENV)/.packages
	$(PYTHON) -m venv --without-pip --clear $(@D)
	echo "import site; site.addsitedir('`echo $(CURDIR)/$(VENV)/lib/python*/site-packages`')" > `echo $(@D)/lib/python*/site-packages`/shared.pth
	$(BIN)/uv pip install --quiet --prerelease=allow --upgrade --python $(@D)/bin/python "`$(BIN)/python docs/version_calendar.py requirement $*`"
	touch $@

# MXNet is retired. It has its own environment, because its last wheel needs a NumPy that is too old
# for everything else.
test-mxnet: install .tools/mxnet/bin/mxnet-is-here
	$(BIN)/uv pip install --quiet --python .tools/mxnet/bin/python --no-deps --reinstall dist/farandole-*.whl
	.tools/mxnet/bin/python -m pytest tests/retired

.tools/mxnet/bin/mxnet-is-here:
	$(BIN)/uv venv --quiet --python $(BIN)/python .tools/mxnet
	$(BIN)/uv pip install --quiet --python .tools/mxnet/bin/python mxnet==1.9.1 numpy==1.23.5 cloudpickle pytest pytest-timeout pytest-rerunfailures
	touch $@

# The whole grid of faults. `test` runs a part of it. target/faults.jsonl records the error of every
# rank and its time.
test-faults: bytecode
	rm -f target/faults.jsonl
	FARANDOLE_FAULTS_REPORT=$(CURDIR)/target/faults.jsonl $(BIN)/python -m pytest tests/faults -m faults
	FARANDOLE_SIMULATION_SEEDS=20000 FARANDOLE_CROWD=10000 cargo test --release -p farandole-membership -p farandole-registrar --lib

# Losses, options and numbers of processes against a plain loop on one process: every pair of them.
# `test` runs a part.
test-parity: bytecode
	$(BIN)/python -m pytest tests/parity --durations=10

# Many ranks: 64 processes on 8 namespaces of this machine, bytes and frames counted, ranks in
# containers of one machine.
test-scale: bytecode
	cargo test --release -p farandole-world -p farandole-kernels -p farandole-collectives -p farandole-negotiation -p farandole-engine -p farandole-transport -p farandole-session
	$(BIN)/python -m pytest tests/scale tests/parallel/test_rounded_sums.py -m "slow or not slow"

# Open ports, hostile files, losses of power, a thousand fits in one process, ten minutes of random
# collectives, a driver that is stopped or cut off from its executors: half an hour at most, in two
# parallel halves. `test` runs the short ones.
SOAKS := $(addprefix tests/trust/test_,soak.py heap.py stopped_driver.py)
test-trust: bytecode packages .tools/azurite .tools/bin/fake-gcs-server jvm-shim/target/classpath
	$(MAKE) --no-print-directory -j2 --output-sync=target trust-soaks trust-rest
	cargo test --release -p farandole-transport -p farandole-registrar --test integration -- relay:: mesh:: crowd::

trust-soaks:
	FARANDOLE_SOAK_SECONDS=$${FARANDOLE_SOAK_SECONDS:-600} $(BIN)/python -m pytest $(SOAKS) --reruns 1 --durations=15

trust-rest:
	$(BIN)/python -m pytest tests/trust $(addprefix --ignore=,$(SOAKS)) tests/faults/test_strangers.py \
	tests/single/test_poisoned_files.py tests/single/test_checkpoint_safety.py tests/single/test_runs.py tests/spark/test_saved.py \
	tests/spark/test_stored_commits.py tests/launch/test_spark_hosts.py tests/launch/test_forwarding.py \
	--reruns 1 --durations=15

# Files for Vale: pages, and the comments and docstrings of the sources.
PROSE := $(wildcard *.md) docs python/farandole $(wildcard crates/*/src)
lint: $(VENV)/.packages .tools/bin/vale
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	cargo xtask check
	.ci/commits
	$(BIN)/ruff check python tests examples bench release docs
	$(BIN)/ruff format --check python tests examples bench release docs
	$(BIN)/pyright
	PYTHONPATH=python $(BIN)/lint-imports --no-cache --no-logo
	.tools/bin/vale --output=line $(PROSE)

# Vale is built from its Go module, because its other packages download a program from a place that
# may be unreachable.
.tools/bin/vale: Makefile
	@command -v go >/dev/null || { echo "missing: go (builds Vale, which checks the prose). Install Go 1.25 or newer." >&2; exit 1; }
	GOBIN=$(CURDIR)/.tools/bin go install github.com/vale-cli/vale/v3/cmd/vale@v3.21.0
	touch $@

# All checks that need a GPU. Without a GPU it prints that there is none.
gpu-check: install
	$(BIN)/python bench/gpu_check.py

bench: install .tools/petastorm/ready
	$(BIN)/python bench/allreduce.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/tensorflow_training.py
	$(BIN)/python bench/failures.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/next_to_petastorm.py
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps torchvision # next to which images are decoded
	$(BIN)/python bench/images.py
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps datasets multiprocess dill xxhash # next to which texts are tokenized
	$(BIN)/python bench/text.py
	$(BIN)/python bench/spark_run.py
	$(BIN)/python bench/spark.py
	$(BIN)/python bench/spark_rows.py
	$(BIN)/python bench/metrics.py
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/tuning.py

install: $(VENV)/.wheel

bytecode: $(VENV)/.bytecode

# TensorFlow's ops are a separate library and a file of the package. In a checkout, that file is a
# link to cargo's output.
tensorflow-ops:
	cargo build --release -p farandole-tensorflow
	ln -sf ../../../target/release/libfarandole_tensorflow.so python/farandole/tensorflow/libfarandole_tensorflow.so

# The Spark plugin is one jar, which the wheel contains. In a checkout it is at the same place in
# the package.
SHIM := python/farandole/spark/farandole-spark.jar
shim: $(SHIM)

$(SHIM): jvm-shim/spark/pom.xml $(shell find jvm-shim/spark/src -type f) | tools
	cd jvm-shim/spark && mvn -q -B -Dstyle.color=never package
	cp jvm-shim/spark/target/farandole-spark.jar $@

# The page of the run viewer: one script and one style. Both contain ours and uPlot's, with the
# licence of uPlot.
PAGE := python/farandole/ui/viewer
UPLOT := crates/ui/page/node_modules/uplot
SCRIPTS := $(addprefix crates/ui/page/,dom.js list.js charts.js run.js main.js)
viewer: $(PAGE).js

$(PAGE).js: $(SCRIPTS) crates/ui/page/viewer.css crates/ui/page/package-lock.json | tools
	npm ci --silent --ignore-scripts --no-audit --no-fund --prefix crates/ui/page
	{ echo '/*'; cat $(UPLOT)/LICENSE; echo; echo '*/'; cat $(UPLOT)/dist/uPlot.min.css; echo; cat crates/ui/page/viewer.css; } > $(PAGE).css
	{ echo '/*'; cat $(UPLOT)/LICENSE; echo; echo '*/'; cat $(UPLOT)/dist/uPlot.iife.min.js; \
	echo '(() => {'; echo '"use strict";'; cat $(SCRIPTS); echo '})();'; } > $@

wheel: $(PACKAGES) tensorflow-ops $(SHIM) $(PAGE).js
	rm -f dist/*.whl
	$(BIN)/maturin build --release --out dist
	for package in horovod petastorm; do $(BIN)/uv build --quiet --wheel --out-dir dist python/$$package-compat || exit 1; done

$(VENV)/.wheel: $(SOURCES) $(PACKAGES) $(SHIM) $(PAGE).js crates/ui/page/index.html
	$(MAKE) PACKAGES=$(PACKAGES) wheel
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --reinstall dist/*.whl
	touch $@

# Tests start hundreds of processes. If PYTHONDONTWRITEBYTECODE is set, as in many containers, each
# process compiles all that it imports (TensorFlow: 7 s of processor time). So all packages are
# compiled once. Some contain files that no Python 3 can compile, hence `|| true`.
$(VENV)/.bytecode: $(VENV)/.wheel
	@echo "compiling the bytecode of all packages, for the tests"
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true
	touch $@

$(VENV)/.packages: pyproject.toml | tools
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra torch --extra lightning --extra tensorflow-cpu --extra spark --extra examples --extra dev
	$(BIN)/uv cache prune --quiet # pyspark is a source archive, and its build leaves 2.4 GB in the cache
	touch $@

$(VENV)/.few: pyproject.toml | tools
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra torch --extra spark --extra examples "maturin>=1.9,<2"
	$(BIN)/uv cache prune --quiet
	touch $@

tools:
	@sh .ci/tools "$(PYTHON)"

# Generates the reference of the settings, then builds the site in target/docs/html. Only this
# target installs Sphinx.
docs: $(VENV)/.packages
	cargo xtask docs
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d target/docs/doctrees docs target/docs/html
	@echo "make docs: target/docs/html/index.html"

# Lines of product code, by crate and by Python package.
size:
	@cargo xtask size

# Opens the external links of the pages, which needs the internet. `make test` checks only their
# form.
links: $(VENV)/.packages
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra docs
	$(BIN)/python -m sphinx -q -b linkcheck -d target/docs/doctrees-links docs target/docs/links

# Builds the files of a release in dist/release: a wheel for glibc 2.17 with licences and a bill of
# materials, an sdist, farandole-horovod and farandole-petastorm. Then the wheel is installed into
# empty environments and used. Needs a clean checkout. With MACHINE=aarch64, it builds the wheel for that processor in
# dist/release-aarch64 and uses it in an emulator.
MACHINE := x86_64
ifeq ($(MACHINE),x86_64)
RELEASE := dist/release
RELEASING := .tools/release/ready
else
RELEASE := dist/release-$(MACHINE)
RELEASING := .tools/release/ready .tools/$(MACHINE)/ready
EMULATED := --emulated .tools/$(MACHINE)/root/usr/bin/python3
SMOKE ?= bare numpy
endif
release: $(SHIM) $(PAGE).js $(RELEASING)
	.tools/release/bin/python release/build.py $(RELEASE) $(MACHINE)
	.tools/release/bin/python release/smoke.py $(RELEASE) $(EMULATED) $(SMOKE)

# Builds the release once more and fails if a byte differs.
release-again: $(SHIM) $(PAGE).js $(RELEASING)
	.tools/release/bin/python release/build.py $(RELEASE)-again $(MACHINE)
	.tools/release/bin/python release/compare.py $(RELEASE) $(RELEASE)-again

.tools/release/ready: pyproject.toml | tools
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python -r pyproject.toml --extra release
	touch $@

.tools/aarch64/ready: .ci/aarch64 release/std.py rust-toolchain.toml | .tools/release/ready
	sh .ci/aarch64 $(@D)
	touch $@

deny:
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check bans licenses sources

clean:
	cargo clean
	rm -rf $(VENV) dist $(SHIM) $(PAGE).js $(PAGE).css crates/ui/page/node_modules jvm-shim/target jvm-shim/spark/target
