"""What kernels hand on as one argument."""

from triton.language.core import _aggregate


def aggregate(cls):
    """Make a value of the class's annotated fields, which are given in their order. From Triton 3.8
    on an aggregate without __init__ is that, but for plain numbers (in Triton's interpreter)."""
    fields = cls.__annotations__

    def __init__(self, *values):
        for (name, kind), value in zip(fields.items(), values, strict=True):
            setattr(self, name, value if isinstance(value, kind) else kind(value))

    __init__.__triton_builtin__ = True  # it is no source of a kernel's
    cls.__init__ = __init__
    return _aggregate(cls)
