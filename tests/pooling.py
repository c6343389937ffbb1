"""How prompts are pooled in tests that need no more of it."""

from runtime.api import PoolingParams
from runtime.batch import Pool

POOLING = PoolingParams(pooling="last", use_activation=False)
OF_ALL = PoolingParams(pooling="mean", use_activation=False)
LAST = Pool(POOLING)
