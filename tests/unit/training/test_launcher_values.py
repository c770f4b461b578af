"""What a worker makes of values that the launching process has changed: refused, told, or passed."""

from __future__ import annotations

import importlib.util
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.errors import InputError
from paceline.training import launcher_values
from paceline.training.launcher_values import LauncherValues
from paceline.training.plain_values import plain

TOP = """
import argparse, collections, enum, functools, heapq, math, os, pathlib, random, time, types
from dataclasses import dataclass, field
import torch
from torch import nn
"""
_names = (f"swept_{place}" for place in itertools.count())


def read(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def sent(folder: Path, source: str, change: str) -> tuple[Path, str, LauncherValues]:
    """What a process that has made a change sends to a worker: as that will read it."""
    name = next(_names)
    path = folder / f"{name}.py"
    path.write_text(f"{TOP}\n{source}")
    module = read(path, name)
    exec(change, vars(module))  # noqa: S102
    return path, name, pickle.loads(pickle.dumps(launcher_values.of_function(module.main)))  # noqa: S301


def outcome(folder: Path, source: str, change: str) -> str:
    """What a worker says that imports the file anew."""
    path, name, values = sent(folder, source, change)
    read(path, name)
    try:
        notes = values.check()
    except InputError as error:
        return f"refused: {error}"
    finally:
        del sys.modules[name]
    return f"told: {notes[0]}" if notes else "passed"


REFUSED = {
    "a number": ("LR = 0.1\ndef main(run): return LR", "LR = 0.5"),
    "dict()": ("C = dict(lr=0.1)\ndef main(run): return C['lr']", "C['lr'] = 0.5"),
    "dict() that a function writes": (
        "C = dict(lr=0.1)\ndef put(v): C['lr'] = v\ndef main(run): return C['lr']",
        "put(0.5)",
    ),
    "a namespace": ("C = types.SimpleNamespace(lr=0.1)\ndef main(run): return C.lr", "C.lr = 0.5"),
    "arguments": ("C = argparse.Namespace(lr=0.1)\ndef main(run): return C.lr", "C.lr = 0.5"),
    "a dataclass": (
        "@dataclass\nclass Conf:\n    lr: float = 0.1\nC = Conf()\ndef main(run): return C.lr",
        "C.lr = 0.5",
    ),
    "a dataclass's own": (
        "@dataclass\nclass Conf:\n    lr: float = 0.1\ndef main(run): return Conf().lr",
        "Conf.lr = 0.5",
    ),
    "None before": ("args = None\ndef main(run): return args.lr", "args = argparse.Namespace(lr=0.5)"),
    "a set": ("S = {1, 2}\ndef main(run): return S", "S.add(3)"),
    "bytes": ("S = b'a'\ndef main(run): return S", "S = b'b'"),
    "a path": ("D = pathlib.Path('a')\ndef main(run): return D", "D = pathlib.Path('b')"),
    "a member": (
        "class A(enum.Enum):\n    x = 1\n    y = 2\nM = A.x\ndef main(run): return M",
        "M = A.y",
    ),
    "a function": ("def a(): return 1\ndef b(): return 2\nF = a\ndef main(run): return F()", "F = b"),
    "a lambda": ("F = lambda x: x\ndef main(run): return F(1)", "F = lambda x: 2 * x"),
    "a default": ("def a(x=1): return x\ndef main(run): return a()", "a.__defaults__ = (2,)"),
    "a class of torch": ("class U:\n    act = nn.ReLU\ndef main(run): return U().act", "U.act = nn.Tanh"),
    "a partial": (
        "F = functools.partial(max, 3)\ndef main(run): return F(4)",
        "F = functools.partial(max, 5)",
    ),
    "a static method": (
        "class U:\n    f = staticmethod(lambda v: v)\ndef main(run): return U.f(1)",
        "U.f = staticmethod(lambda v: 2 * v)",
    ),
    "a long list": ("L = [0] * 1500\ndef main(run): return L[0]", "L[0] = 7"),
    "deep": (
        "C = {'a': {'b': {'c': {'d': {'e': {'f': 1}}}}}}\ndef main(run): return C",
        "C['a']['b']['c']['d']['e']['f'] = 2",
    ),
    "beside a counter": (
        "C = {'lr': 0.1, 'n': 0}\ndef main(run):\n    C['n'] += 1\n    return C['lr']",
        "C['lr'] = 0.5; main(0)",
    ),
    "counted and read": (
        "S = {'a': 0}\ndef main(run): S['a'] += 1\ndef show(): return S['b']",
        "S['b'] = 1",
    ),
    "counted and kept by an object": (
        "S = {'a': 0}\nO = argparse.ArgumentParser(S)\ndef main(run): S['a'] += 1; return O",
        "S['b'] = 1",
    ),
    "another object's attribute": (
        "class U:\n    lr = 0.1\n    def go(self, opt): opt.lr = self.lr\ndef main(run): return U().go(run)",
        "U.lr = 0.5",
    ),
    "given to what leaves it": (
        "C = {'lr': 0.1}\ndef show(c): return c['lr']\ndef main(run): return show(C)",
        "C['lr'] = 0.5",
    ),
    "behind a cache": (
        "LR = 0.1\n@functools.lru_cache\ndef look(x): return LR\ndef main(run): return look(3)",
        "LR = 0.5",
    ),
    "behind a property that is kept": (
        "LR = 0.1\nclass U:\n    @functools.cached_property\n    def lr(self): return LR\ndef main(run): return U().lr",
        "LR = 0.5",
    ),
    "by getattr": ("class H:\n    k = 3\ndef main(run): return getattr(H, 'k')", "H.k = 4"),
}
TOLD = {
    "a condition": ("LR = 0.1\nif os.environ.get('NOPE'): LR = 0.2\ndef main(run): return LR", "LR = 0.5"),
    "the environment": ("LR = float(os.environ.get('LR', '0.1'))\ndef main(run): return LR", "LR = 0.5"),
    "an object": (
        "class C:\n    def __init__(self): self.lr = 0.1\nc = C()\ndef main(run): return c.lr",
        "c.lr = 0.5",
    ),
    "a tensor": (
        "torch.manual_seed(0)\nX = torch.randn(4)\ndef main(run): return X",
        "X = X * 2",
    ),
    "written by any key": (
        "C = {'lr': 0.1}\ndef main(run):\n    for k in 'ab': C[k] = 1\n    return C['lr']",
        "C['lr'] = 0.5",
    ),
    "given to somebody": ("L = [3]\ndef main(run): return heapq.heappush(L, 2)", "L.append(7)"),
    "in place": ("L = [1, 2]\ndef main(run): L.reverse()", "L.reverse()"),
    "beside a clock in a table": (
        "C = {'t': time.time(), 'lr': 0.1}\ndef main(run): return C['lr']",
        "C['lr'] = 0.5",
    ),
    "beside a clock in a namespace": (
        "C = types.SimpleNamespace(t=time.time(), lr=0.1)\ndef main(run): return C.lr, C.t",
        "C.lr = 0.5",
    ),
    "beside a clock in an object": (
        (
            "class A:\n    def __init__(self):\n        self.t = time.time()\n        self.lr = 0.1\n"
            "C = A()\ndef main(run): return C.lr, C.t"
        ),
        "C.lr = 0.5",
    ),
    "rebound": ("LR = 0.1\ndef main(run):\n    global LR\n    LR *= 0.9\n    return LR", "LR = 0.5"),
    "counted and asked for by a library": (
        "class U(nn.Module):\n    dump_patches = 1\ndef main(run): U.dump_patches += 1",
        "U.dump_patches = 5",
    ),
    "counted and asked for by a made-up name": (
        "class U:\n    n = 1\ndef main(run):\n    U.n += 1\n    return vars(U)['mn'[1:]]",
        "U.n = 5",
    ),
    "an object that is added to": (
        (
            "class K:\n    def __init__(self): self.n = 1\n    def __iadd__(self, x): self.n += x; return self\n"
            "S = K()\ndef main(run):\n    global S\n    S += 1"
        ),
        "S += 5",
    ),
    **{
        f"drawn behind {seeds}": (f"{seeds}\nX = {drawn}\ndef main(run): return X", "X = X * 2")
        for seeds, drawn in [
            ("random.seed(1)", "random.random()"),
            ("from numpy import random as r; r.seed(1)", "r.rand()"),
            ("import numpy as np; np.random.seed(1)", "np.random.rand()"),
            ("torch.random.manual_seed(1)", "torch.rand(3)"),
            ("def seed(n): random.seed(n)\nseed(3)", "random.random()"),
            ("from transformers import set_seed; set_seed(1)", "random.random()"),
            ("r = random.Random(3)", "r.random()"),
            ("import numpy as np; r = np.random.default_rng(seed=3)", "r.normal()"),
            ("g = torch.Generator().manual_seed(1)", "torch.rand(3, generator=g)"),
        ]
    },
}
PASSED = {
    "nothing": ("LR = 0.1\ndef main(run): return LR", "pass"),
    "an attribute's name": ("lr = 0.1\ndef main(run): return run.lr", "lr = 0.5"),
    "a result's name": ("loss = None\ndef main(run): return run.step().loss", "loss = 0.5"),
    "nobody reads it": (
        "class U:\n    rows = []\n    lr = 1\ndef main(run): return U.lr",
        "U.rows.append(1)",
    ),
    "a field that nobody reads": (
        "c = types.SimpleNamespace(lr=1, seen=[])\ndef main(run): return c.lr",
        "c.seen.append(1)",
    ),
    "a clock": ("T = time.time()\nL = T + 1\ndef main(run): return T, L", "pass"),
    "a number drawn": (
        "X = torch.rand(3)\nU = random.random()\ndef main(run): return X, U",
        "X = torch.rand(3)",
    ),
    "which process": ("M = __name__ == 'x'\nP = os.getpid()\ndef main(run): return M, P", "M = True; P = 3"),
    "a rank": ("R = int(os.environ.get('RANK', '-1'))\ndef main(run): return R", "R = 0"),
    "an object with its clock": (
        "class C:\n    def __init__(self): self.t = time.time()\nc = C()\ndef main(run): return c.t",
        "c.t = 0",
    ),
    "an object with its clock that the code writes": (
        (
            "class T:\n    def __init__(self): self.t, self.n = time.time(), []\n    def lap(self): self.n.append(1)\n"
            "t = T()\ndef main(run): return t.lap(), t.t"
        ),
        "t.lap(); t.t = 0",
    ),
    "a field of a dataclass with its clock": (
        (
            "@dataclass\nclass C:\n    lr: float = 0.1\n    t: float = field(default_factory=time.time)\n"
            "c = C()\ndef main(run): return c.lr, c.t"
        ),
        "pass",
    ),
    "a key with its clock": ("C = {'t': time.time(), 'lr': 0.1}\ndef main(run): return C", "pass"),
    "a copy of the environment": ("E = dict(os.environ)\ndef main(run): return E['HOME']", "E['RANK'] = '3'"),
    "a counter behind a cache": (
        "N = 0\n@functools.cache\ndef look(x):\n    global N\n    N += 1\ndef main(run): return look(3), N",
        "main(0)",
    ),
    "a cache": ("C = {}\ndef main(run):\n    C[3] = 4", "main(0)"),
    "an alias": ("C = {}\ndef main(run):\n    c = C\n    if 3 not in c: c[3] = 4", "main(0)"),
    "a counter": ("N = 0\ndef main(run):\n    global N\n    N += 1", "main(0)"),
    "a counter in a table": (
        "S = {'a': {'n': 0}}\ndef main(run): S['a']['n'] += 1",
        "main(0)",
    ),
    "a class's counter": (
        "class M:\n    n, rows = 0, []\n    @classmethod\n    def tick(cls): cls.n += 1; cls.rows += [1]\ndef main(r): M.tick()",
        "main(0)",
    ),
    "counted": ("S = collections.Counter()\ndef main(run): S.update([1])", "main(0)"),
    "a heap": ("Q = []\ndef main(run): heapq.heappush(Q, 1)", "main(0)"),
    "a logger": (
        "class W:\n    run = None\n    def init(self): W.run = 'one'\nw = W()\ndef main(run): return w.run",
        "w.init()",
    ),
    "counted by the launcher, too": (
        "S = collections.Counter()\ndef main(run): S['runs'] += 1\nif __name__ == '__main__': print(S['launches'])",
        "S['launches'] += 1",
    ),
    "a table counted by the launcher, too": (
        "S = {'n': {'runs': 0}}\ndef main(run): S['n']['runs'] += 1",
        "S['n']['launches'] = 3",
    ),
    "a class's counter that begins above": (
        "class N(nn.Module):\n    built = 0\n    def __init__(self): super().__init__(); N.built += 1\nm = N()\ndef main(r): N()",
        "N()",
    ),
    **{
        f"drawn unseeded beside {seeds}": (f"{seeds}\nX = {drawn}\ndef main(run): return X", "X = X * 2")
        for seeds, drawn in [
            ("torch.manual_seed(1)", "''.join(random.choices('abc', k=6))"),
            ("torch.manual_seed(1)", "random.random()"),
            ("import numpy as np; torch.manual_seed(1)", "np.random.rand()"),
            ("import numpy as np; np.random.seed(1); random.seed(1)", "torch.rand(3)"),
            ("from random import uniform; torch.manual_seed(1)", "uniform(1, 2)"),
            ("g = torch.Generator(); g.manual_seed(1)", "random.random() + torch.rand(3)"),
            ("r = random.Random(1); r.seed(1)", "random.random()"),
            ("random.seed(1); r = random.Random()", "r.random()"),
            ("import numpy as np; np.random.seed(1)", "np.random.default_rng().normal()"),
            ("random.seed(); torch.seed()", "random.random() * torch.rand(3)"),
            ("if __name__ == '__main__': random.seed(1)", "random.random()"),
            ("import numpy as np; np.random.seed(1); D = torch.distributions.Normal(0, 1)", "D.sample()"),
            ("E = argparse.Namespace(seed=print); E.seed(1)", "random.random()"),
        ]
    },
    "the interpreter": (
        "import sys\nP = pathlib.Path(sys.executable)\ndef main(run): return P",
        "P = P.parent / '..' / P.name",
    ),
    "nan": ("X = {'a': float('nan')}\ndef main(run): return X", "pass"),
}
HOSTILE = """
class Proxy:
    @property
    def __class__(self): raise RuntimeError("outside of its context")
class Text:
    def __str__(self): raise RuntimeError("str")
    __repr__ = __str__
class Asked:
    def __getattr__(self, name): raise RuntimeError(name)
class I(int):
    def __int__(self): raise RuntimeError("int")
class L(list):
    def __getitem__(self, i): raise RuntimeError("list")
    def __iter__(self): raise RuntimeError("list")
class D(dict):
    def __len__(self): raise RuntimeError("len")
    def items(self): raise RuntimeError("items")
class Kind(type):
    def __getattribute__(cls, name): raise RuntimeError(name)
class Odd(metaclass=Kind): pass
class Lazy(types.ModuleType):
    def __getattr__(self, name): raise ImportError(name)
import sys
lazy = sys.modules["lazy_of_the_test"] = Lazy("lazy_of_the_test")
P, T, A, i, l, d, K, N, O = Proxy(), {Text(): 1}, Asked(), I(3), L([1]), D(a=1), {1: "a"}, [1], Odd
one, other = types.SimpleNamespace(), types.SimpleNamespace()
one.other, other.one = other, one
CHAIN = None
def main(run):
    import lazy_of_the_test
    return P, T, A, i, l, d, K, N, O, lazy, one, other, f0
"""
HOSTILE += "\n".join(f"def f{n}(): return f{n + 1}()" for n in range(1500)) + "\ndef f1500(): return CHAIN\n"


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_certain_is_refused(tmp_path: Path, case: str) -> None:
    assert outcome(tmp_path, *REFUSED[case]).startswith("refused: ")


@pytest.mark.parametrize("case", TOLD)
def test_what_may_matter_is_told(tmp_path: Path, case: str) -> None:
    assert outcome(tmp_path, *TOLD[case]).startswith("told: ")


@pytest.mark.parametrize("case", PASSED)
def test_what_is_another_in_each_process_passes(tmp_path: Path, case: str) -> None:
    assert outcome(tmp_path, *PASSED[case]) == "passed"


def test_objects_that_raise_when_they_are_looked_at(tmp_path: Path) -> None:
    assert outcome(tmp_path, HOSTILE, "pass") == "passed"
    del sys.modules["lazy_of_the_test"]


def test_the_end_of_a_long_chain_of_calls(tmp_path: Path) -> None:
    assert "CHAIN is 1 in the process" in outcome(tmp_path, HOSTILE, "CHAIN = 1")
    del sys.modules["lazy_of_the_test"]


@pytest.mark.parametrize(
    ("source", "change", "said"),
    [
        (
            "C = {'lr': 1, 'act': None}",
            "C['lr'] = 2",
            "C is {'lr': 2} in the process that launches and {'lr': 1} in",
        ),
        ("C = {1: 'a', 2: 'b'}", "C[1] = 'c'", "C is {1: 'c'} in the process that launches and {1: 'a'} in"),
        (
            "C = {'a': None}",
            "C['a'] = print",
            "C is {'a': print} in the process that launches and {'a': None} in",
        ),
        ("C = [1]", "C.append(C)", "C is [1, itself] in"),
        ("C = 1", "C = 10 ** 6000", "C is a very large number in"),
        ("C = 1", "C = 10 ** 100", "C is a number of 333 bits in"),
        (
            "C = lambda: 1",
            "C = lambda: 2",
            "C is <lambda> in the process that launches and another <lambda> in",
        ),
        (
            "class U:\n    lr = 1\nC = 0\ndef more(): return U.lr",
            "U.lr = 2",
            "lr of U is 2 in the process that launches and 1 in the workers, which import NAME anew: pass it as an",
        ),
        (
            "C = torch.float32",
            "C = torch.float64",
            "pass it as an argument, launch(main, NAME.C), or set it inside",
        ),
    ],
)
def test_how_it_is_said(tmp_path: Path, source: str, change: str, said: str) -> None:
    called = "more()" if "more" in source else "0"
    path, name, values = sent(tmp_path, f"{source}\ndef main(run): return C, {called}", change)
    read(path, name)
    with pytest.raises(InputError) as raised:
        values.check()
    del sys.modules[name]
    assert said.replace("NAME", name) in str(raised.value)


def test_a_note_names_a_few(tmp_path: Path) -> None:
    names = [f"A{place}" for place in range(6)]
    bound = "\n".join(f"{name} = float(os.environ.get('NOPE', '1'))" for name in names)
    text = outcome(
        tmp_path,
        f"{bound}\ndef main(run): return {', '.join(names)}",
        "; ".join(f"{name} = 2" for name in names),
    )
    assert text.count(" in the process that launches and 1.0 in the workers") == 3
    assert ", and 3 more, which import swept_" in text
    assert text.endswith("or set it inside of main, if they are to have it")


def test_refusals_become_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CHANGED_VALUES", "note")
    assert outcome(tmp_path, *REFUSED["a number"]).startswith("told: ")
    monkeypatch.setenv("PACELINE_CHANGED_VALUES", "never")
    with pytest.raises(InputError, match="PACELINE_CHANGED_VALUES is 'never', but must be refuse or note"):
        outcome(tmp_path, *REFUSED["a number"])


def test_a_function_whose_code_pytest_or_another_has_rewritten_is_the_same() -> None:
    source = "def twice(x):\n    assert x\n    return 2 * x\n"
    here: dict[str, object] = {"__name__": "helper"}
    there: dict[str, object] = {"__name__": "helper"}
    exec(compile(source, "helper.py", "exec"), here)  # noqa: S102
    exec(compile(source.replace("assert x", "if not x: raise AssertionError"), "helper.py", "exec"), there)  # noqa: S102
    assert plain(here["twice"]) == plain(there["twice"])
    exec(compile("\n" + source, "helper.py", "exec"), there)  # noqa: S102
    assert plain(here["twice"]) != plain(there["twice"])


UNORDERED = """
VOCAB = frozenset(f"w{i}" for i in range(30000))
TABLE = {w: len(w) for w in VOCAB}
PAIRS = {(a, b, frozenset(a + b)) for a in "abcd" for b in "wxyz"}
KINDS = {"a", "b", "c", "d", "e", "f"}
CFG = {"labels": KINDS, "sorted": sorted(KINDS), "n": len(KINDS)}
F = lambda x: x in ("q", frozenset({"aa", "bb", "cc"}))
def main(run): return VOCAB, TABLE, PAIRS, CFG, F
"""
ORDERED = [
    "C = list({'cat', 'dog', 'bird', 'fish', 'cow'})",
    "S = {'cat', 'dog', 'bird', 'fish', 'cow'}\nC = {name: place for place, name in enumerate(S)}",
    "C = []\nfor one in {'cat', 'dog', 'bird', 'fish', 'cow'}: C.append(one)",
    "C = []\nC.extend({'cat', 'dog', 'bird', 'fish', 'cow'})",
    "C = []\nC += {'cat', 'dog', 'bird', 'fish', 'cow'}",
    "C = [n for n in frozenset('abcdefgh')]",
    "C, *_ = [*{'cat', 'dog', 'bird', 'fish', 'cow'}],",
    "class K: names = {'cat', 'dog', 'bird', 'fish', 'cow'}\nC = tuple(K.names)",
    "C = list(set(map(str, range(3000))))",
]
READ = """
import pickle, runpy, sys
from paceline.training import launcher_values
import swept
values = launcher_values.of_function(swept.main)
if len(sys.argv) > 1:
    sys.stdout.buffer.write(pickle.dumps(values))
else:
    print(*pickle.load(sys.stdin.buffer).check())
"""


def across(folder: Path, source: str) -> str:
    """What a worker says whose hashes are others than the launcher's."""
    (folder / "swept.py").write_text(f"{TOP}\n{source}")
    said = b""
    for seed, argument in (("1", ["send"]), ("2", [])):
        done = subprocess.run(
            [sys.executable, "-c", READ, *argument],
            cwd=folder,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(folder)},
            input=said,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        said = done.stdout
    return said.decode()


def test_sets_are_compared_in_whichever_order(tmp_path: Path) -> None:
    assert across(tmp_path, UNORDERED) == "\n"


def test_an_order_that_is_a_sets_is_told_and_not_refused(tmp_path: Path) -> None:
    parts = "\n".join(source.replace("C", f"C{place}") for place, source in enumerate(ORDERED))
    names = [f"C{place}" for place in range(len(ORDERED))]
    text = across(tmp_path, f"{parts}\ndef main(run): return {', '.join(names)}")
    assert f", and {len(ORDERED) - 3} more" in text
    assert "sort it, or pass it as an argument" in text


def test_a_change_of_a_large_set_is_seen(tmp_path: Path) -> None:
    source = "V = frozenset(f'w{i}' for i in range(30000))\ndef main(run): return V"
    assert outcome(tmp_path, source, "V = V - {'w5'} | {'w'}").startswith("refused: ")


@pytest.mark.parametrize("made", ["bytes(40 << 20)", "'a' * (40 << 20)", "set(range(400_000))"])
def test_what_is_large_is_compared_by_its_size(made: str) -> None:
    value = eval(made)  # noqa: S307
    found = plain([value, b"b" * 20_000])
    assert not found[0].mark
    assert found[1].mark  # one that is small is read all the same


def test_what_comes_after_very_much_that_nobody_reads(tmp_path: Path) -> None:
    source = "c = types.SimpleNamespace(seen=[], lr=1)\ndef main(run): return c.lr"
    assert outcome(tmp_path, source, "c.seen += [{n: n for n in range(100)} for _ in range(900)]") == "passed"
