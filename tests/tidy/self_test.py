"""Each check of tidy.py finds what it is there for, and is silent about a tree that is in order."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import code_checks
import english
import licenses
import readmes
import python_cycles
import rooms
import text_checks
import tree

SUMMARY = pathlib.Path(__file__).resolve().parent.parent / "summary.py"


class TidyTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, files):
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def check(self, function, files, **arguments):
        self.write(files)
        return function(tree.Tree(self.root), **arguments)

    def expect(self, messages, *parts):
        self.assertEqual(len(messages), len(parts), messages)
        for message, part in zip(messages, parts):
            self.assertIn(part, message)

    def test_includes_go_one_way(self):
        messages = self.check(code_checks.include_graph, {
            "cuda/device.h": '#include "server/pool/pool.h"\n#include <grpcpp/grpcpp.h>\n',
            "server/pool/pool.h": '#include "cuda/device.h"\n#include "kvpool/v1/engine.pb.h"\n#include <vector>\n',
            "client/session.h": '#include "server/pool/pool.h"\n',
        })
        self.expect(messages, "client/ must not include server/pool/pool.h", "cuda/ must not include server/pool/pool.h",
                    "cuda/ is a leaf and must not include grpcpp/grpcpp.h")

    def test_rooms(self):
        messages = self.check(rooms.rooms, {
            "server/pool/pool.h": '#include "server/wire/check.h"\n#include "server/base/clock.h"\n',
            "server/wire/check.h": "", "server/base/clock.h": '#include "server/pool/pool.h"\n',
            "server/attic/a.h": ""})
        self.expect(messages, "server/attic/a.h: server/attic/ has no floor",
                    "server/base/clock.h:1: server/base/ must not include server/pool/pool.h",
                    "server/pool/pool.h:1: server/pool/ must not include server/wire/check.h")

    def test_cycles(self):
        messages = self.check(rooms.cycles, {
            "server/a.h": "", "server/a.cc": '#include "server/a.h"\n#include "server/b.h"\n',
            "server/b.h": '#include "server/c.h"\n', "server/c.cc": '#include "server/a.h"\n', "server/c.h": "",
            "server/d.h": '#include "server/a.h"\n', "server/e.cc": '#include "server/d.h"\n#include "server/c.h"\n'})
        self.expect(messages, "a circle of units: server/a, server/b, server/c")

    def test_python_cycles(self):
        messages = self.check(python_cycles.python_cycles, {
            "client/p/__init__.py": "from p.a import A\n", "client/p/a.py": "import os\nfrom p import b\nfrom q import p\n",
            "client/p/b.py": "def f():\n    import p.c\n", "client/p/c.py": "from p.a import A\n",
            "client/p/d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.e import E\n",
            "client/p/e.py": "from p.d import D\nfrom p.a import A\n"})
        self.expect(messages, "client/p: a circle of modules: a, b, c")

    def test_includes_exist_and_start_at_the_root(self):
        messages = self.check(code_checks.include_graph, {
            "server/a.cc": '#include "b.h"\n#include "server/gone.h"\n', "server/b.h": ""})
        self.expect(messages, '"b.h": include from the root', "server/gone.h, which is not in the tree")

    def test_sources_live_in_known_folders(self):
        self.expect(self.check(code_checks.include_graph, {"lib/a.cc": ""}), "lib/a.cc: sources live in")

    def test_dead_files(self):
        files = {
            "server/CMakeLists.txt": "add_library(a main.cc ${CMAKE_CURRENT_SOURCE_DIR}/pool/pool.cc) # dead.cc\n",
            "server/main.cc": "", "server/pool/pool.cc": "", "server/dead.cc": "", "server/compiled.cc": ""}
        self.expect(self.check(code_checks.sources_are_built, files, compiled=["server/compiled.cc"]),
                    "server/dead.cc: no target builds it")

    def test_names_that_two_sources_of_a_target_have(self):
        self.expect(self.check(code_checks.own_names, {
            "server/CMakeLists.txt": "add_library(a a.cc b.cc)\nadd_library(c c.cc d.cc)\n",
            "server/a.cc": "constexpr int kA = 1, kC = 2;\nstruct B {\n};\nint F(int a) {\n}\nint X::G(int a) {\n}\nvoid H(int) {\n}\n",
            "server/b.cc": "constexpr char kA[] = {};\nconstexpr int kC = F(kA);\nstruct B;\nstatic int F(int a) {\n  constexpr int kI = 2;\n}\n"
                           "int Y::G(int a) {\n}\nvoid H(char) {\n}\n",
            "server/c.cc": "constexpr int kA = 1;\n",
            "server/d.h": "inline constexpr int kZ{1}, kA = 2;\n",
            "server/d.cc": '#include "server/d.h"\n'}),
            "server/b.cc: F(int a) is also in server/a.cc, of the same target a", "server/b.cc: kA is also in server/a.cc",
            "server/b.cc: kC is also in server/a.cc", "server/c.cc: kA hides that of server/d.h, in sources of the same target c")

    def test_programs_that_ctest_does_not_know(self):
        self.expect(self.check(code_checks.test_programs_are_run, {
            "tests/a/CMakeLists.txt": "add_executable(a_test a_test.cc)\nadd_executable(b_test b_test.cc)\n"
                                      "discover_tests(b_test)\n"}), "a_test is built, but ctest does not know it")

    def test_conditionals(self):
        self.expect(self.check(code_checks.conditionals, {
            "cuda/a.h": "#ifndef A_H_\n#define A_H_\n#ifdef __CUDACC__\n#endif\n#ifdef USE_GPU\n#endif\n#endif\n",
            "tests/a.cc": "#ifdef __SANITIZE_THREAD__\n#endif\n",
            "server/b.cc": '// #ifdef X\nconst char* s = "\\n#if Y";\n#if 0\n#endif\n'}),
            "cuda/a.h:5: '#ifdef USE_GPU'", "server/b.cc:3: '#if 0'")

    def test_include_guards(self):
        self.expect(self.check(code_checks.include_guards, {
            "cuda/a.h": "#pragma once\n", "cuda/b.h": "#ifndef KVPOOL_CUDA_B_H_\n#define KVPOOL_CUDA_B_H_\n#endif\n"}),
            "cuda/a.h: expected the include guard KVPOOL_CUDA_A_H_")

    def test_scripts(self):
        self.write({"tests/good.sh": "#!/bin/bash\nset -euo pipefail\n"})
        (self.root / "tests/good.sh").chmod(0o755)
        self.expect(self.check(code_checks.scripts, {
            "tests/a.sh": "#!/bin/bash\nset -euo pipefail\nif true; do\n", "tests/b.py": "def f(:\n", "tests/c.sh": "#!/bin/bash\n"}),
            "syntax error", "a.sh: starts with #! but is not executable", "tests/b.py:1", "does not say 'set -euo", "not executable")

    def test_formatting(self):
        messages = self.check(code_checks.formatting, {".clang-format": "BasedOnStyle: Google\n", "cuda/a.cc": "int  a ;\n"})
        if messages is None:
            self.skipTest("clang-format is not installed")
        self.expect(messages, "cuda/a.cc: run clang-format")

    def test_python_lint(self):
        messages = self.check(code_checks.python_lint, {"ruff.toml": "", "tests/a.py": "import os\n"})
        if messages is None:
            self.skipTest("ruff is not installed")
        self.expect(messages, "tests/a.py:1:8: F401")

    def test_lengths(self):
        self.expect(self.check(code_checks.lengths, {
            "server/a.h": "\n" * 201, "server/b.cc": "void F() {\n" + "  G();\n" * 71 + "}\n"}), "201 lines", "function of 72 lines")

    def test_banned_words(self):
        self.expect(self.check(text_checks.banned_words, {
            "server/a.cc": "// TO" "DO: later\n", "README.md": "See /wo" "rk/main.\n", "deploy/a.sh": "curl https://py" "pi.org\n",
            "server/b.cc": "// part of session 3 " "of it\nint todo_count;\n"}),
            "README.md:1", "deploy/a.sh:1", "server/a.cc:1", "server/b.cc:1")

    def test_undocumented_proto(self):
        self.expect(self.check(text_checks.proto_documented, {"proto/kvpool/v1/a.proto": """syntax = "proto3";
// A pair.
message Pair {
  uint64 left = 1;  // Left.
  // Right.
  repeated kvpool.v1.Right right = 2;
  map<string, string> naked = 3;
  oneof one {
    uint64 bare = 4;
  }
}
message Bald {}
// State.
enum State {
  STATE_UNSPECIFIED = 0;  // None.
  STATE_BARE = 1;
}
service S {
  rpc Do(Pair) returns (Pair);
}
"""}), "naked has no comment", "bare has no comment", "Bald has no comment", "STATE_BARE has no comment", "Do has no comment")

    def test_proto_style(self):
        self.expect(self.check(text_checks.proto_style, {"proto/kvpool/v1/a.proto": """package kvpool.v1;
message bad_name { uint64 one = 1; uint64 Two = 1; }
enum SpaceKind { SPACE_KIND_NONE = 0; OTHER = 1; }
enum Late { LATE_A = 1; }
"""}), "message bad_name is not CamelCase", "OTHER should start with SPACE_KIND_", "enum Late does not start at 0",
                    "uses a field number twice", "bad_name.Two is not lower_snake_case")

    def test_metric_names_both_ways(self):
        self.expect(self.check(text_checks.metric_names, {
            "server/metrics/metrics.cc": 'Add("kvpool_blocks"); Add("kvpool_unused_total"); Add("kvpool_rpc_seconds");',
            "dashboards/a.json": '{"panels": [{"targets": [{"expr": "sum(kvpool_blocks) + kvpool_gone"}]}]}',
            "deploy/prometheus/rules.yaml": "expr: rate(kvpool_rpc_seconds_bucket[5m])\n"}),
            "dashboards/a.json: kvpool_gone is not in", "no panel and no rule uses kvpool_unused_total")

    def test_dashboards(self):
        self.expect(self.check(text_checks.dashboards, {
            "dashboards/a.json": '{"id": 3, "panels": [{"id": 1, "type": "stat", "title": "A", "gridPos": {"x": 20, "w": 6}, '
                                 '"datasource": {"uid": "P1"}, "targets": [{"expr": "rate(a[5m])"}]}]}'}),
            "id must be null", "uid None is missing", "no variable of type datasource", "wider than", "not the variable",
            "no description", "fixed interval")

    def test_runbooks(self):
        self.expect(self.check(text_checks.runbooks, {
            "deploy/prometheus/rules.yaml": "groups:\n- rules:\n  - alert: A\n    labels:\n      severity: warning\n    annotations:\n"
                                            "      summary: s\n      runbook_url: https://x/deploy/runbooks/a.md\n",
            "deploy/runbooks/b.md": ""}), "A has no description", "a.md does not exist", "b.md: no alert points to it")

    def test_trailing_comments(self):
        self.expect(self.check(english.trailing_comments, {
            "server/a.h": "#ifndef A_H_\nint bytes = 0;  // Of the space.\nint ms = 0;  // ms\nint n = 0;  // The space's blocks.\n"
                          "// Of all of them.\nconst char* s = \"x  // of y\";\n}  // namespace kvpool\n#endif  // In a.h\n",
            "proto/kvpool/v1/a.proto": "uint64 left = 1;  // By block.\nuint64 right = 2;  // Offset, in bytes.\n"}),
            "a.proto:1: '// By block.'", "server/a.h:2: '// Of the space.'")

    def test_licenses(self):
        mine = '[[annotations]]\npath = ["*", "proto/**"]\nSPDX-FileCopyrightText = "Us"\nSPDX-License-Identifier = "Apache-2.0"\n'
        line = "// SPDX-License" "-Identifier: "
        self.expect(self.check(licenses.licenses, {
            "REUSE.toml": mine, "a.py": "", "LICENSES/Apache-2.0.txt": "text", "LICENSES/MIT.txt": "text",
            "proto/kvpool/v1/a.proto": line + "Apache-2.0\n", "proto/kvpool/v1/b.proto": 'syntax = "proto3";\n',
            "proto/c.cc": line + "MIT\n", "vendor/d.h": line + "MIT\n"}),
            "proto/c.cc: says MIT, where REUSE.toml says Apache-2.0", "b.proto: others copy it", "vendor/d.h: REUSE.toml does not say",
            "LICENSES/MIT.txt: nothing is under it")
        # The last annotation that names a file counts, and its license needs a text.
        theirs = mine + mine.replace('["*", "proto/**"]', '"proto/*.cc"').replace("Apache-2.0", "BSD-3-Clause")
        (self.root / "vendor/d.h").unlink()
        self.expect(self.check(licenses.licenses, {"REUSE.toml": theirs, "proto/c.cc": "", "proto/kvpool/v1/b.proto": line + "Apache-2.0"}),
                    "LICENSES/BSD-3-Clause.txt: missing", "LICENSES/MIT.txt: nothing is under it")
        (self.root / "REUSE.toml").unlink()
        self.assertIn("a.py: REUSE.toml does not say whose it is, and under which license", licenses.licenses(tree.Tree(self.root)))

    def page(self, **pages):
        """Messages about README.md and other pages in a small tree."""
        return self.check(readmes.readme, {
            "README.md": "# Top\n", "client/examples/engine.cc": "int main() {}\n",
            "CMakePresets.json": '{"configurePresets": [{"name": "release"}]}',
            "server/CMakeLists.txt": "add_executable(kvpoold main.cc)\n",
            "server/main.cc": 'flags.Add("listen", &listen);', "deploy/demo.sh": "#!/bin/bash\n", **pages})

    def test_readme_commands(self):
        self.expect(self.page(**{"README.md": (
            "```sh\nbuild/release/bin/kvpoold --listen=x --nope   # words --here\n"
            "sudo build/release/bin/ghost\ndeploy/demo.sh --quick\ngit status --short\nuntil frobnicate; do sleep 1; done\n"
            "pip install ./client/gone ./client/examples\n```\n```text\nnot a command\n```\n")}),
            "kvpoold has no flag --nope", "ghost is not built", "demo.sh has no flag --quick", "frobnicate does not exist",
            "client/gone does not exist")

    def test_readme_shell(self):
        self.expect(self.page(**{"README.md": (
            "```sh\nserve() {  # PORT\n  X=1 kvpoold --listen=$1 \\\n    --listen=2\n}\nserve 8001 >/tmp/8001.log 2>&1 &\n"
            "python - <<END\nfrom kvpool import Session\nEND\ncurl -s \"http://x/a|b\" |\n  grep -o 'a; b'\n```\n")}))

    def test_readme_programs_links_and_files(self):
        self.expect(self.page(**{
            "README.md": "# Top\n[gone](docs/gone.md) [here](server/README.md#rooms-and-floors) [there](server/README.md#attic) [up](#top)\n"
                         "```cpp\nint main() {}\n```\n```cpp\nint mian() {}\n```\n",
            "server/README.md": "## Rooms, and floors\n`main.cc`, `server/main.{cc,h}`, `examples/*.cc`\n1. Add `server/new.h`, `pool/NAME.h`: `space/verbs.cc`\n"}),
            "the cpp block 'int mian", "link to docs/gone.md", "link to server/README.md#attic",
            "server/README.md: names server/main.h", "server/README.md: names space/verbs.cc")

    def test_readme_length(self):
        self.expect(self.page(**{"README.md": "word | " * 901 + "\n```text\nno word\n```\n"}), "README.md: 901 words")

    def test_server_map(self):
        self.expect(self.check(readmes.server_map, {
            "server/README.md": "`batch` and `deferred`; `Batches`, `Daemon::Tidy`, `NAME`", "server/space/batch.cc": "class Batches {};", "server/space/deferred.h": "",
            "server/space/batch_size.h": "", "server/sim/README.md": "`replay.cc`", "server/sim/replay.h": "", "server/sim/sweep.cc": "",
            "server/replacement/lru.h": ""}),
            "nothing in the sources is called Tidy", "server/sim/sweep.cc: server/sim/README.md does not say", "server/space/batch_size.h: server/README.md does not say")


class SummaryTest(unittest.TestCase):
    """The table that ends tests/run.sh counts what happened, not what should have."""

    def run_summary(self, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                (pathlib.Path(folder) / name).write_text(text)
            return subprocess.run([sys.executable, str(SUMMARY), folder], capture_output=True, text=True, check=False)

    def test_counts_and_reasons(self):
        result = self.run_summary({
            "release-build.check": "passed\t10\t\n", "release.ctest": "",
            "release.xml": '<testsuite><testcase name="A" time="1" status="run"/><testcase name="B" status="fail"/>'
                           '<testcase name="C" status="notrun"><system-out>x.cc:1: Skipped\nno GPU here\n</system-out></testcase>'
                           '<testcase name="D_NOT_BUILT" status="notrun"/></testsuite>'})
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stdout.splitlines()[-1], "2 passed, 2 failed, 1 skipped")
        self.assertIn("not run: release: C: no GPU here", result.stdout)
        self.assertIn("FAILED: release: B, D_NOT_BUILT", result.stdout)

    def test_a_run_without_results_failed(self):
        result = self.run_summary({"packages.check": "passed\t1\t\n", "asan.ctest": ""})
        self.assertEqual((result.returncode, result.stdout.splitlines()[-1]), (1, "1 passed, 1 failed, 0 skipped"))

    def test_nothing_run_is_no_success(self):
        self.assertEqual(self.run_summary({}).returncode, 1)


if __name__ == "__main__":
    unittest.main()
