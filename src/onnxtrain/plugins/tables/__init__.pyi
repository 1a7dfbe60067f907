from .shards import Shards as Shards
from .windows import Windows as Windows
