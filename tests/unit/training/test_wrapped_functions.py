"""Code without a file travels also where functools has wrapped it up."""

import subprocess
import sys

CODE = """
import functools, math, pickle, types
from paceline.training.by_value import pack

@functools.lru_cache(maxsize=7)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)

@functools.singledispatch
def kind(one): return "any"

@kind.register
def _(one: int): return "int"

class Data:
    def __init__(self, n): self.n = n
    @functools.cached_property
    def twice(self): return 2 * self.n
    @functools.lru_cache
    def times(self, factor): return self.n * factor

def use(n):
    data = Data(n)
    return fib(n), fib.cache_parameters()["maxsize"], kind(n), kind("x"), data.twice, data.times(3), data.__dict__

fib(20)
payload = pack((use, functools.lru_cache(math.sqrt)))
for name in ("fib", "kind", "Data", "use", "_"):
    del globals()[name]
use, root = payload.open()
print(use(10), root(4.0))
"""


def test_what_functools_wraps_travels_by_value() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=CODE, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "(55, 7, 'int', 'any', 20, 30, {'n': 10, 'twice': 20}) 2.0\n", done.stderr
