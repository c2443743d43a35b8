"""Words in answers of mathematics: units, counted things, scales, numbers, operations.

Only words in these tables have a meaning; any other word is compared as a word (math_reading.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

Dimensions = tuple[tuple[str, int], ...]  # sorted: (("length", 1), ("time", -1)); of counted things: ()


@dataclass(frozen=True, slots=True)
class Unit:
    """Dimensions of a unit, and its size in base units.  Units without dimensions are counted things."""

    dimensions: Dimensions
    factor: Fraction = Fraction(1)

    def times(self, other: Unit, exponent: int = 1) -> Unit:
        """Return the product with a power of another unit."""
        powers = dict(self.dimensions)
        for name, power in other.dimensions:
            powers[name] = powers.get(name, 0) + power * exponent
        kept = tuple(sorted((name, power) for name, power in powers.items() if power))
        return Unit(kept, self.factor * other.factor**exponent)


COUNT = Unit(())

# dimension: "factor spelling spelling …; …"; a plural in s is added.
_MEASURES = {
    "length": "1 m meter metre; 1/1000000000 nm nanometer nanometre; 1/1000000 µm μm um micrometer micrometre micron;"
    " 1/1000 mm millimeter millimetre; 1/100 cm centimeter centimetre; 1/10 dm decimeter decimetre;"
    " 1000 km kilometer kilometre; 254/10000 in inch inches; 3048/10000 ft foot feet; 9144/10000 yd yard;"
    " 1609344/1000 mi mile; 1/10000000000 Å angstrom ångström; 149597870700 AU au;"
    " 9460730472580800 ly lightyear; 30856775814913673 pc parsec;"
    " 30856775814913673000 kpc kiloparsec; 30856775814913673000000 Mpc megaparsec",
    "mass": "1 g gram gramme gm; 1/1000 mg milligram; 1/1000000 µg μg ug microgram; 1000 kg kilogram kilo kgm;"
    " 1000000 ton tonne; 45359237/100000 lb lbs pound-mass; 45359237/1600000 oz ounce",
    "time": "1 s sec second; 1/1000 ms millisecond; 1/1000000 µs μs us microsecond; 1/1000000000 ns nanosecond;"
    " 60 min minute; 3600 h hr hour; 86400 day; 604800 week wk; 2629746 month; 31556952 year yr; 315569520 decade;"
    " 3155695200 century centuries",
    "volume": "1 l L liter litre ltr; 1/1000 ml mL milliliter millilitre; 1/100 cl cL centiliter centilitre;"
    " 3785411784/1000000000 gal gallon; 946352946/1000000000 qt quart; 473176473/1000000000 pint;"
    " 2365882365/10000000000 cup; 1478676478125/100000000000000 tablespoon tbsp tbs;"
    " 492892159375/100000000000000 teaspoon tsp; 35239/1000 bushel; 30 drop-of",
    "temperature": "1 ℃ Celsius celsius centigrade; 1 K kelvin",
    "fahrenheit": "1 ℉ Fahrenheit fahrenheit",
    "money": "1 $ dollar USD usd buck; 1/100 cent ¢; 1/20 nickel; 1/10 dime",
    "euro": "1 € euro EUR eur",
    "pound": "1 £ GBP gbp quid; 1/100 pence penny pennies",
    "yen": "1 ¥ yen JPY jpy yuan RMB CNY",
    "rupee": "1 ₹ rupee Rs Rs. INR",
    "peso": "1 peso; 1 ₱",
    "won": "1 ₩ won",
    "force": "1 N newton Newton; 1000 kN kilonewton",
    "energy": "1 J joule Joule; 1000 kJ kilojoule; 1000000 MJ megajoule; 3600000 kWh kilowatt-hour;"
    " 4184/1000 cal; 4184 kcal Calorie; 16021766/100000000000000000000000000 eV electronvolt;"
    " 16021766/100000000000000000000000 keV;"
    " 16021766/100000000000000000000 MeV; 16021766/100000000000000000 GeV; 1/10000000 erg",
    "power": "1 W watt Watt; 1000 kW kilowatt; 1000000 MW megawatt",
    "voltage": "1 V volt Volt; 1/1000 mV millivolt",
    "current": "1 A amp ampere Ampere; 1/1000 mA milliamp",
    "resistance": "1 Ω ohm Ohm \\Omega; 1000 kΩ",
    "pressure": "1 Pa pascal Pascal; 1000 kPa kilopascal; 101325 atm; 100000 bar-unit",
    "frequency": "1 Hz hertz Hertz; 1000 kHz; 1000000 MHz; 1000000000 GHz",
    "charge": "1 C coulomb Coulomb; 1/1000000 µC μC",
    "field": "1 tesla Tesla; 1/1000 mT; 1/10000 gauss",
    "capacity": "1 farad Farad; 1/1000000 µF μF; 1/1000000000 nF; 1/1000000000000 pF",
    "loudness": "1 dB decibel",
    "turns": "1 rev revolution",
    "amount": "1 mol mole; 1/1000 mmol",
    "information": "1 byte B; 1/8 bit; 125000 megabit; 1000 kB KB kilobyte; 1000000 MB megabyte;"
    " 1000000000 GB gigabyte; 1000000000000 TB terabyte",
    "angle": "1 rad radian",
    "area": "1 acre",
    "hectare": "1 hectare ha",
}  # fmt: skip
_VARIABLES = frozenset("msghlLNJWVAKCB")  # a unit or a variable, unless it is upright
_SHORT_SCALES = frozenset("KB")  # 5 K may be 5000

# Things that people count, in the plural; their singular is added.
_COUNTED = """
acorns actors ads adults airplanes albums alligators animals answers antacids ants apartments appetizers apples apps
aprons aquariums arms arrangements arrows artichokes articles artists artworks asparagus athletes attendees aunts
avocados awards babies backpacks badges bagels baggies bags baguettes bakers bales balloons balls bananas bandages bands
barrels bars baseballs basketballs baskets batches bathrooms baths batteries beads beakers beans bears beats bedbugs
bedrooms beds bees beetles beignets belts benches berries bicycles bids bikes billboards bills birds biscuits blackbirds
blankets blisters blocks blouses blueberries boards boats bollards bolts bones bonnets bonuses books bottlecaps bottles
bouquets bowls boxes boys bracelets braids branches breaks bricks brochures brothers brownies brushes bubbles buckets
bugs builders buildings bulbs bunches bundles bunnies burgers burritos buses bushels bushes businesses butterflies
buttons buyers cabinets cages cakes calculators calls calories camels cameras campers candies candles canes cans
cantaloupes caps capsules caramels cardinals cards carnations carpets carriages carrots cars cartons cases casts
caterpillars cats cells chairs channels chapters characters charges checks cheerleaders cheesecakes chefs cherries
chests chickens chicks children chimichangas chips chocolates choices chores circles citations cities claims clarinets
classes classmates classrooms claws clerks clients clips clothes clotheslines clouds clovers cloves clowns clusters
coaches coals coats coconuts coffees coins colors colours columns combinations comics complaints computers cones
consonants contacts containers contestants cookies copies corns costumes counters countries couples coupons courses
cousins cows crabs crackers crafts cranberries craters crates crayons credits crickets croissants crops croutons crows
cubes cucumbers cupcakes curlers customers cuttlebones cycles daisies dates daughters decks decorations deer degrees
deliveries demerits desks desserts devices diagonals diamonds diapers diaries dice digits dinners discounts dishes
dislikes divisors doctors dogs dolls dolphins donations donuts doors doses dots doughnuts dragons drawings dreams
dresses drinks drops drummers drums ducklings ducks dumplings earrings ears edges eggplants eggs elements elephants
elves emails employees entries envelopes episodes erasers errors events exams eyes faces factors fairies families fans
farmers farmhands feathers feedings females fences ferns figures figurines files filets fingers firecrackers fires
fireworks fishes flags flashlights flats flavors fleas flies flights flips floors flowers flutes flyers folders foldings
followers footballs footprints forks forms foxes frames friends frogs fronds fruits functions galleries games gates
geckos geese gems gemstones geraniums ghosts gifts gingerbreads giraffes girls glasses gloves gnomes goals goats
goldfish grades grains grandchildren grapes groups guests guides guitars gumballs guns guppies gusts haircuts hairs
halls hamburgers hamsters hands handshakes hares hats heads hearts helmets hens highlighters hikes hits hives holes
homes honeydews hoodies hoots horses horseshoes hotdogs households houses hushpuppies individuals inhabitants insects
instructions instruments integers intersections intervals islands issues items jackets jars jeans jelly jellybeans
jerseys jewels jobs joggers jokes journals judges jugs juices jumps kangaroos kernels keys kids kindergartners kinds
kittens knives ladders ladybugs lambs lamps laps laptops lattes lawns layers leaves legos legs lemons lengths leopards
lessons letters levels licks lightbulbs lighters lights likes lilies limes lines links lions lipsticks listens lizards
llamas loads loaves logs lollipops lots lunches macarons macaroons machines magazines maggots magnets males managers
mangoes mangos maps marbles marigolds markers marks marshmallows masks matchboxes matches matchsticks math meals
meatballs medals melons members men messages mice microphones milkshakes millipedes minks minnows mirrors mistakes
models monitors monkeys monsters motorcycles mountains movies muffins multiples mushrooms nails names napkins necklaces
neighbors nephews newspapers nieces nights notebooks notes nougats novels numbers nurses nuts objects omelets onions
oranges orchards orchids orcs orders outcomes outfits oysters packages packets packs paddles pages pails paintings pairs
pallets pamphlets pancakes pandas panels pans pants papayas paperclips papers paragraphs parents parrots parsnips
participants parts passengers passes pastries patches paths patients patrons paws peaches peanuts pearls pears peas
pebbles pencils penguins pens people peppers periods permutations persons petals pets petunias phones photographs photos
phrases pianists pickles pictures pieces pies pigeons piglets pigs piles pillows pills pineapples pinecones pines pins
pitches pixels pizzas places planes planks plants plates players playlists plays plums pockets pods pointers points
pollywogs pomegranates poodles popsicles portions postcards posters posts potatoes pots pouches pounds precious presents
pretzels primes prizes problems products programs puffs pumpkins pumps pupils puppets puppies pups purses pushups
puzzles questions quilts quizzes rabbits racers racquets raisins raspberries rats records recoveries rectangles
reflections refuels regions reports reps residents restaurants returns rhinestones rhinos ribbons riddles rides ridges
rings robins robots rocks rolls roommates rooms roosters roots roses rotations rounds rows rubies rugs rungs runners
sacks salads sandcastles sandwiches saplings sapphires sausages scallops scarves schools scoops screws seagulls
seashells seasons seats sections seedlings seeds segments semesters seniors sentences sequins servings sessions sets
settings shapes shares sharks sheep sheets shells shelves ships shirts shoes shops shorts shots shows shrimp siblings
sides signatures singers sisters sites situps skeins skeletons skips skirts sleeves slices smores snacks snails snakes
snapdragons snowballs snowflakes soaps socks sodas sofas soldiers solutions songs sonnets sons sours spaces sparklers
spears spiders spokes spools spoons sports spots squares squats squirrels stacks stairs stamps stanzas starfish stars
states stations statues steaks stems steps stickers sticks stingrays stitches stones stools stoplights stops stores
stories strands strawberries straws streetlights streets strings stripes strokes students stuffies subjects subscribers
subscriptions subsets suckers suitcases suits sunflowers surfers surveys swallows swans sweaters sweets swimmers systems
tables tablets tabs tacks tacos tadpoles tangerines tanks tapes taps tarantulas tasks tattoos teachers teacups teams
tears teddies teenagers teeth televisions tents terms terriers tests tetras texts things thorns tickets ties tigers
tiles timers times tins tires tissues toads toddlers toenails toes tokens tomatoes tools toothbrushes toothpicks
toppings touchdowns tourists towels towers toys tractors trains trays treats trees triangles tricks trips trolls
trophies truckloads trucks trumpets tubes tubs tulips turkeys turns turtles twigs types unicorns units vacations
vaccines values vampires vans vases vegetables vehicles vents vertices vests vibrations videos violins visitors visits
vlogs volunteers voters votes waffles wagons waiters walls walnuts wands washers washes watches watermelons waves ways
weasels websites weeds weekdays weekends whales wheels whiskers whistlers widgets wights wigs windows wings winners wins
wipes women words workers worms yachts yogurts zebras zits zombies
"""
_SINGULARS = {"primes": "primes", "squares": "squares", "cubes": "cubes", "buses": "bus",
              "children": "child", "men": "man",
              "women": "woman", "people": "person", "mice": "mouse", "teeth": "tooth",
              "geese": "goose", "vertices": "vertex", "dice": "die", "leaves": "leaf", "loaves": "loaf",
              "knives": "knife", "shelves": "shelf", "scarves": "scarf", "grandchildren": "grandchild"}  # fmt: skip
# Words beside a counted thing that change nothing: "12 red balls left".
_BESIDE = (
    "altogether apiece big black blue brown different distinct each extra full gold gray green grey in large left long "
    "more new of old orange pink positive possible purple real red regular remaining silver small tall the total "
    "unique wide white whole yellow"
)
_NEEDLESS = frozenset(
    {
        "each",
        "left",
        "in",
        "total",
        "altogether",
        "apiece",
        "remaining",
        "old",
        "tall",
        "long",
        "wide",
        "high",
        "deep",
        "away",
        "ago",
    }
)  # also without a thing
_SHORT = {"mph": "mi/h", "mpg": "mi/gal", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "sqft": "ft2", "rpm": "1/min",
          "fps": "ft/s", "bps": "bit/s", "cc": "cm3"}  # fmt: skip


def _plurals(word: str) -> Iterator[str]:
    yield word
    if len(word) > 1 and word.isalpha() and not word.endswith("s"):
        yield word + "s"


def _measures() -> Iterator[tuple[str, Unit]]:
    powers = {"volume": (("length", 3), Fraction(1, 1000)), "area": (("length", 2), Fraction(40468564224, 10**7)),
              "hectare": (("length", 2), Fraction(10_000))}  # fmt: skip
    for dimension, entries in _MEASURES.items():
        base, scale = powers.get(dimension, ((dimension, 1), Fraction(1)))
        for entry in entries.split(";"):
            factor, *words = entry.split()
            for word in words:
                for spelling in _plurals(word):
                    yield spelling, Unit((base,), Fraction(factor) * scale)


def _counted() -> Iterator[str]:
    for word in _COUNTED.split():
        yield word
        if word in _SINGULARS:
            yield _SINGULARS[word]
        elif word.endswith(("ches", "shes", "sses", "xes", "toes", "zzes")) and word != "toes":
            yield word[:-2]
        elif word.endswith("ies"):
            yield from (word[:-1], word[:-3] + "y")
        elif word.endswith("s"):
            yield word[:-1]


UNITS: Mapping[str, Unit] = MappingProxyType(dict.fromkeys(_counted(), COUNT) | dict(_measures()))
DEGREES_WORDS = frozenset({"degree", "degrees", "deg"})
CURRENCY_SIGNS = "$€£¥₹₱₩"


def unit_of(word: str) -> Unit | None:
    """Return the unit that a word spells, or None.  Case matters up to three letters: mW is not MW."""
    return UNITS.get(word) or (UNITS.get(word.lower()) if len(word) > 3 else None)


def may_be_variable(word: str) -> bool:
    """True for a unit that may be a letter of an expression, unless it is upright."""
    return word in _VARIABLES


def may_be_scale(word: str) -> bool:
    """True for a letter that spells a unit and may also abbreviate a scale."""
    return word in _SHORT_SCALES


def abbreviation(word: str) -> str | None:
    """Return the units that a word such as mph abbreviates."""
    return _SHORT.get(word.lower())


def is_beside_unit(word: str) -> bool:
    """True for a word beside a counted thing that changes nothing: "12 red balls left"."""
    return word.lower() in _BESIDE.split()


def is_needless(word: str) -> bool:
    """True for a word behind a bare number that changes nothing: "12 in total"."""
    return word.lower() in _NEEDLESS


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS: Mapping[str, int] = MappingProxyType(
    {word: value for value, word in enumerate(_ONES.split())}
    | {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
)
_POWERS = {
    "hundred": 2, "thousand": 3, "lakh": 5, "lac": 5, "million": 6, "crore": 7, "milliard": 9, "billion": 9,
    "trillion": 12, "quadrillion": 15, "quintillion": 18, "sextillion": 21, "septillion": 24, "octillion": 27,
    "nonillion": 30, "decillion": 33, "googol": 100,
}  # fmt: skip
_GROUPS = {"dozen": 12, "score": 20, "gross": 144, "grand": 1000, "mn": 10**6, "mln": 10**6, "bn": 10**9,
           "bln": 10**9, "tn": 10**12, "mio": 10**6, "mrd": 10**9, "myriad": 10**4, "tens": 10}  # fmt: skip
SCALES: Mapping[str, int] = MappingProxyType(
    {word + ending: 10**power for word, power in _POWERS.items() for ending in ("", "s")}
    | {word + ending: value for word, value in _GROUPS.items() for ending in ("", "s")}
)
_ORDINALS = (
    "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth"
)
PARTS: Mapping[str, Fraction] = MappingProxyType(
    {word + ending: Fraction(1, value) for value, word in enumerate(_ORDINALS.split(), 3) for ending in ("", "s")}
    | {"half": Fraction(1, 2), "halves": Fraction(1, 2), "quarter": Fraction(1, 4), "quarters": Fraction(1, 4)}
    | {word[:-1] + "ieth" + ending: Fraction(1, 10 * value)
       for value, word in enumerate(_TENS.split(), 2) for ending in ("", "s")}
    | {word + "th" + ending: Fraction(1, 10**power) for word, power in _POWERS.items() for ending in ("", "s")}
)  # fmt: skip

# Phrases, longest first, and their form in TeX.
_PHRASES = tuple(
    (tuple(phrase.split()), tex)
    for phrase, tex in (
        ("to the power of", "^"),
        ("the square root of", "sqrt"),
        ("the cube root of", "cbrt"),
        ("square root of", "sqrt"),
        ("cube root of", "cbrt"),
        ("root of", "sqrt"),
        ("root", "sqrt"),
        ("divided by", "/"),
        ("multiplied by", r"\times"),
        ("times", r"\times"),
        ("plus", "+"),
        ("minus", "-"),
        ("negative", "-"),
        ("over", "/"),
        ("squared", "^2"),
        ("cubed", "^3"),
        ("factorial", "!"),
        ("twice", "2 \\cdot "),
        ("double", "2 \\cdot "),
        ("triple", "3 \\cdot "),
        ("per cent", "%"),
        ("percent", "%"),
        ("percents", "%"),
        ("percentage", "%"),
        ("pct", "%"),
        ("is equal to", "="),
        ("equals", "="),
    )
)
PHRASES: Mapping[str, str] = MappingProxyType(  # whole answers, and their form in TeX
    dict.fromkeys(("all real numbers", "all reals", "all real x", "the set of all real numbers"), r"\mathbb{R}")
    | dict.fromkeys(
        ("no solution", "no solutions", "no real solution", "no real solutions", "there is no solution",
         "there are no solutions", "the empty set", "empty set"), r"\emptyset",
    )
    | {"does not exist": r"\text{DNE}", "positive infinity": r"\infty", "no limit": r"\text{DNE}"}
)  # fmt: skip
OPERATIONS: Mapping[str, tuple[tuple[tuple[str, ...], str], ...]] = MappingProxyType(  # by their first word
    {first: tuple(pair for pair in _PHRASES if pair[0][0] == first) for first in {phrase[0] for phrase, _ in _PHRASES}}
)
