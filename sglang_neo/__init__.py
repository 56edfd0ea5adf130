"""sglang_neo: SGLang with part of the KV cache, and its decode attention, in host memory and on the host CPU.

Importing the package is cheap on purpose (no torch, no SGLang): Python imports it in every process of a server,
and a ``.pth`` file may import it at every interpreter start (``sglang_neo.platforms.torchvision_bridge``).
"""

__version__ = "0.1.0"
