from .prune import prune as prune
from .report import PruneResult as PruneResult
from .sparse import save_sparse as save_sparse
