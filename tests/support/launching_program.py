"""A program in which launches come from every kind of line that Python has."""

EVERYTHING = """
import asyncio, contextlib, functools, threading

def leaf(name):
    launch(name)
    launch(name)

def loops(n):
    for i in range(n):
        launch("for")
        if i % 2:
            launch("odd")
        else:
            leaf("even")
    while n:
        n -= 1
        launch("while")
    else:
        launch("else")

def comprehensions():
    a = [launch("list") for _ in range(3)]
    b = {launch(i) for i in range(3)}
    c = {i: launch("dict") for i in range(3)}
    d = list(launch("generator") for _ in range(3))
    e = [
        launch("several lines")
        for _ in range(3)
        if not launch("condition")
    ]

def numbers(n):
    launch("first")
    for i in range(n):
        x = yield i; launch("after yield")
        launch("next")
    launch("last")

def generators():
    for i in numbers(3):
        launch("consumer")
    g = numbers(5)
    next(g); launch("between")
    g.send(1); launch("again")
    g.close()
    launch("closed")
    h = numbers(2)
    next(h)
    try:
        h.throw(KeyError("thrown"))
    except KeyError:
        launch("thrown out")
    launch(list(zip(numbers(2), numbers(3))))

def delegating():
    yield from numbers(2)
    launch("delegated")

def lambdas():
    f = lambda: launch("lambda")
    f(); launch("after lambda")
    g = lambda n: (
        launch("a") or
        launch("b")
    )
    g(1)
    list(map(lambda x: launch("mapped"), range(3))); launch("after map")

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        launch("before")
        try:
            return function(*args)
        finally:
            launch("finally")
    return wrapper

@decorated
def wrapped(n):
    launch("wrapped")
    return n and wrapped(n - 1)

@contextlib.contextmanager
def context():
    launch("enter")
    try:
        yield
    finally:
        launch("exit")

class Manager:
    def __enter__(self):
        launch("__enter__")
    def __exit__(self, *error):
        launch("__exit__")
        return True
    @property
    def value(self):
        launch("property")
    def __add__(self, other):
        launch("__add__")
        return self

def failing(n):
    launch("fails")
    if n:
        failing(n - 1)
    raise ValueError(n)

def exceptions():
    try:
        failing(3)
    except ValueError:
        launch("except")
    finally:
        launch("finally")
    with Manager(): failing(2)
    launch("suppressed")
    with contextlib.suppress(ValueError): failing(1); launch("never")
    launch("after suppress")
    with context():
        launch("inside")
    with context(), Manager() as m:
        launch("two")
        failing(0)
    m = Manager()
    m + m + m; m.value; launch("operators")
    try: failing(0)
    except ValueError: launch("on one line")
    for name in "abc":
        try:
            if name == "b": failing(1)
        except ValueError:
            continue
        launch("others")

def several_lines():
    launch(
        leaf(
            "argument"
        )
    )
    x = (
        launch("one")
        or launch("two")
        or launch(
            "three"
        )
    )

async def coroutine(n):
    launch("coroutine")
    await asyncio.sleep(0); launch("after await")
    for i in range(n):
        await asyncio.sleep(0)
        launch("task")
    return n

async def items(n):
    for i in range(n):
        launch("async generator")
        yield i
        await asyncio.sleep(0)

async def tasks():
    launch("tasks")
    await coroutine(2); launch("awaited")
    await asyncio.gather(*(coroutine(i) for i in range(4)))
    launch("gathered")
    async for i in items(3):
        launch("async for")
    x = [launch("async list") async for i in items(2)]
    try:
        await asyncio.wait_for(asyncio.sleep(10), 0.001)
    except asyncio.TimeoutError:
        launch("timeout")

def recursion(n):
    launch("down")
    if n:
        recursion(n - 1); launch("up")

def matching(x):
    match x:
        case [a]:
            launch("one")
        case [a, b] if launch("guard"):
            launch("two")
        case _:
            launch("other")

def round():
    loops(5)
    comprehensions()
    generators()
    list(delegating())
    lambdas()
    wrapped(2)
    exceptions()
    several_lines()
    asyncio.run(tasks())
    recursion(4)
    matching([1]); matching([1, 2]); matching(3)
    launch("round")
"""
