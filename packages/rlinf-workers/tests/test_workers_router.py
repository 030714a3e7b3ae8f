"""The router: which engine samples a turn, and what happens to episodes when a rank is lost or a stage is given up."""

import asyncio

import pytest

from rlinf_workers.agents.link import (
    Abandoned,
    AgentTask,
    Answer,
    Ask,
    Begin,
    EpisodeReport,
    JoinStage,
    NewPicture,
    PictureRequest,
    PictureTensor,
    StageBroken,
    StageOver,
)
from rlinf_workers.agents.pictures import HistoryPicture
from rlinf_workers.agents.records import AgentTrajectory, Sampled
from rlinf_workers.agents.router import KEPT_TURNS, RankLink, Router

STAGE = "train 3, weights 3"
SAMPLED = Sampled(token_ids=[1], logprobs=[0.0], versions=[(1, 3)])
PIXELS = {"pixel_values": PictureTensor(dtype="float32", shape=[1], content=b"four")}
OF_TASK, OF_TOOL = (HistoryPicture(digest=digit * 16, token_ids=[4, 4]) for digit in "ab")


class Episodes:
    """Keeps what the router says."""

    def __init__(self):
        self.begun, self.answered, self.num_cancelled = [], [], 0

    def begin(self, message):
        self.begun.append(message.episode)

    def answer(self, message):
        self.answered.append(message.request)

    async def abandon(self):
        self.num_cancelled += 1


class Setting:
    """A router with ranks that have joined a stage."""

    def __init__(self, num_ranks):
        self.router = Router()
        self.episodes = self.router.episodes = Episodes()
        self.num_ranks, self.sent = num_ranks, [[] for _ in range(num_ranks)]
        self.ranks = [self.rank(number) for number in range(num_ranks)]

    def rank(self, number):
        link = RankLink(f"rollout/{number}", self.sent[number].append)
        self.join(link)
        return link

    def join(self, link, stage=STAGE):
        asyncio.run(self.router.join(link, JoinStage(stage=stage, num_ranks=self.num_ranks)))

    def begin(self, rank, index, number=1, pictures=()):
        """Returns the episode's number in the router, if it begins there."""
        task = AgentTask(
            index=index, member=0, step=3, phase="train", messages=[], text="", answer="", pictures=list(pictures)
        )
        before = len(self.episodes.begun)
        self.router.begin(self.ranks[rank], Begin(episode=number, task=task, noise=index))
        return self.episodes.begun[-1] if len(self.episodes.begun) > before else None

    def ask(self, episode, request, *pictures):
        token_ids = [1, *(token for picture in pictures for token in picture.tokens)]
        self.router.heard(Ask(request=request, episode=episode, token_ids=token_ids, noise=request))

    def sampling(self):
        """The requests at each rank."""
        return [sorted(rank.turns) for rank in self.ranks]

    def pictures(self, rank):
        """Of each picture that was sent to a rank: the episode, its digest, and whether its pixels came along."""
        return [(one.episode, one.digest[0], bool(one.arguments)) for one in self.of(rank, NewPicture)]

    def of(self, rank, kind):
        return [message for message in self.sent[rank] if isinstance(message, kind)]


@pytest.fixture
def three():
    return Setting(3)


def report(episode):
    return EpisodeReport(episode=episode, trajectory=AgentTrajectory(nodes=[]))


def test_turns_stay_at_their_engine_until_another_has_much_less_to_do(three):
    episodes = [three.begin(0, index) for index in range(KEPT_TURNS + 3)]
    for request, episode in enumerate(episodes[:-2], 1):
        three.ask(episode, request)
    assert three.sampling() == [list(range(1, KEPT_TURNS + 2)), [], []]
    three.ask(episodes[-2], 20)
    three.ask(episodes[-1], 21)
    assert three.sampling()[1:] == [[20], [21]]
    assert [ask.engine for ask in three.of(1, Ask)] == [""]
    three.router.answer(three.ranks[1], Answer(request=20, sampled=SAMPLED))
    three.ask(episodes[-2], 22)
    assert three.sampling()[1:] == [[22], [21]] and three.of(1, Ask)[-1].engine == "kept"
    three.router.answer(three.ranks[1], Answer(request=22, sampled=SAMPLED))
    three.ask(episodes[0], 23)
    assert 23 in three.sampling()[1] and three.of(1, Ask)[-1].engine == "moved"


def test_a_stage_ends_for_all_ranks_once_no_rank_has_episodes(three):
    first, second = three.begin(0, 0), three.begin(1, 1)
    three.router.heard(report(first))
    for rank in (0, 2, 1):
        assert not three.of(0, StageOver)
        three.router.no_more(three.ranks[rank])
    assert not three.of(0, StageOver)
    three.router.heard(report(second))
    assert all(len(three.of(rank, StageOver)) == 1 for rank in range(3))
    assert [message.episode for message in three.of(1, EpisodeReport)] == [1]


def test_episodes_outlive_the_loss_of_their_rank_and_the_stage(three):
    over, running = three.begin(1, 0, number=5), three.begin(1, 1, number=6)
    three.router.heard(report(over))
    three.ask(running, 7)
    assert three.sampling() == [[], [7], []]
    three.router.lost(three.ranks[1])
    assert [len(three.of(rank, StageBroken)) for rank in range(3)] == [1, 0, 1]
    for rank in (0, 2):
        three.router.leave(three.ranks[rank], 4)
        assert three.of(rank, Abandoned)[-1].number == 4
    three.join(three.ranks[0])
    assert three.sampling() == [[7], [], []] and three.of(0, Ask)[-1].engine == "lost"
    three.ranks[1] = three.rank(1)
    three.router.answer(three.ranks[0], Answer(request=7, sampled=SAMPLED))
    assert three.episodes.answered == [7]
    assert three.begin(0, 0, number=8) is None and three.of(0, EpisodeReport)[-1].episode == 8
    assert three.begin(1, 1, number=9) is None and three.episodes.num_cancelled == 1  # when the first rank joined
    three.router.heard(report(running))
    assert three.of(1, EpisodeReport)[-1].episode == 9


def test_a_replaced_rank_takes_the_place_of_one_whose_connection_has_not_ended(three):
    """Its machine is gone. Turns that it had are sampled elsewhere, and ranks that are done stay so."""
    episode = three.begin(1, 0)
    three.router.no_more(three.ranks[0])
    three.ask(episode, 1)
    assert three.sampling() == [[], [1], []]
    gone, three.ranks[1] = three.ranks[1], three.rank(1)
    assert sum(1 in rank.turns for rank in three.ranks) == 1 and not three.of(0, StageBroken)
    three.router.answer(gone, Answer(request=1, sampled=SAMPLED))
    three.router.lost(gone)
    assert not three.episodes.answered and not three.of(0, StageBroken)
    three.router.heard(report(episode))
    for rank in (1, 2):
        three.router.no_more(three.ranks[rank])
    assert three.of(0, StageOver)


def test_no_turn_goes_to_an_engine_with_other_weights(three):
    """A rank that was lost, or is at another stage, samples nothing; episodes of other weights are cancelled."""
    episode = three.begin(0, 0)
    for rank in three.ranks:
        three.router.leave(rank, 1)
    three.ask(episode, 1)
    three.join(three.ranks[0], "train 3, weights 2")
    assert three.episodes.num_cancelled == 2 and three.sampling() == [[], [], []]
    three.ask(episode, 2)
    assert three.sampling() == [[], [], []] and three.begin(0, 0) is not None


def picture(episode, of):
    return NewPicture(episode=episode, digest=of.digest, token_ids=of.token_ids, arguments=PIXELS)


def test_an_engine_gets_the_pixels_of_a_turn_once(three):
    """Those of the task from the episode's rank, when another engine samples; others from the router."""
    episodes = [three.begin(0, index, index, [OF_TASK]) for index in range(1, KEPT_TURNS + 5)]
    for request, episode in enumerate(episodes[: KEPT_TURNS + 1], 1):
        three.ask(episode, request, OF_TASK)
    assert not three.pictures(0) and not three.of(0, PictureRequest), "the rank has the pictures of its prompts"
    moved = episodes[KEPT_TURNS + 1 :]
    for request, episode in enumerate(moved[:2], 20):
        three.ask(episode, request, OF_TASK)
    assert [one.digest for one in three.of(0, PictureRequest)] == [OF_TASK.digest], "asked for once"
    assert three.sampling()[1:] == [[], []]
    three.router.take_picture(picture(0, OF_TASK))
    assert three.sampling()[1:] == [[20], [21]] and three.pictures(1) == three.pictures(2) == [(0, "a", True)]
    assert [type(one) for one in three.sent[1]] == [NewPicture, Ask]
    three.router.heard(picture(moved[2], OF_TOOL))
    assert three.pictures(0) == [(moved[2], "b", True)]
    three.router.answer(three.ranks[1], Answer(request=20, sampled=SAMPLED))
    three.ask(moved[2], 22, OF_TASK, OF_TOOL)
    assert three.pictures(1)[1:] == [(0, "a", False), (0, "b", True)] and 22 in three.sampling()[1]


def test_pictures_outlive_the_rank_that_had_them(three):
    episode = three.begin(1, 0, 5, [OF_TASK])
    three.router.heard(picture(episode, OF_TOOL))
    three.ask(episode, 7, OF_TASK, OF_TOOL)
    three.router.lost(three.ranks[1])
    three.router.leave(three.ranks[0], 1)
    three.router.leave(three.ranks[2], 1)
    three.join(three.ranks[0])
    assert not three.ranks[0].turns, "nobody has the picture of its task"
    three.ranks[1] = three.rank(1)
    assert three.begin(1, 0, 8, [OF_TASK]) is None and three.pictures(1) == [(5, "b", True), (8, "b", True)]
    assert three.sampling() == [[], [7], []] and three.of(1, Ask)[-1].engine == "lost"
